"""Memory planning: sizes of the KV, state and snapshot pools, and their allocation."""
