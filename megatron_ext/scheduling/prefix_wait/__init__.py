"""Prefix waits: requests that wait for a prefix that another request computes."""
