"""Routing: decisions a second, and a simulated fleet."""
