"""Replicas on this machine: started, watched, and found again by the next coordinator."""
