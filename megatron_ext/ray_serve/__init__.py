"""Replicas under Ray Serve; see docs/ray.md. Importing this package imports neither Ray nor torch."""
