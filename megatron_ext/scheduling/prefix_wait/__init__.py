"""Requests that wait for a prefix that another one computes."""
