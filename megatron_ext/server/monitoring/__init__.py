"""Metrics, history, traces of requests, and what the cache holds."""
