"""Readers of recorded traces: a module for each format, and shared helpers."""
