"""Replicas of the fleet: identities, heartbeats, groups, and the file that names them."""
