"""Operators: time of each by each backend, beside plain torch."""
