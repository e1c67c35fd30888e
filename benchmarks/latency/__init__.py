"""Latency: time to the first token, and the time of a step."""
