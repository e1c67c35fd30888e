"""Routing: decisions a second, a simulated fleet, and real replicas."""
