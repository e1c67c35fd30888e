"""Scheduling: life of requests on the host and planning of steps. Standard library only."""
