"""Metrics, their history, request traces, and the view of the prefix cache."""
