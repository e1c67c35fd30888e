"""Snapshots of recurrent states: positions at which a step takes them, and allocation of slots."""
