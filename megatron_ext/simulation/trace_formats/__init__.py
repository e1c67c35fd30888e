"""Readers of recorded traces: a module for each format, and what they share."""
