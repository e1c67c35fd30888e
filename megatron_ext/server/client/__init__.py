"""Requests of the server in the engine: the thread that steps, and the handles of what it computes."""
