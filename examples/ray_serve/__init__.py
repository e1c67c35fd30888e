"""Replicas under Ray Serve; see docs/fleet.md."""
