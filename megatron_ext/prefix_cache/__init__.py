"""Prefix cache: KV blocks and snapshots of recurrent states, found by content. Standard library only, no torch."""
