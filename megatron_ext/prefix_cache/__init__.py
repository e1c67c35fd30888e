"""What is cached: blocks of KV and snapshots of states, found by content. Standard library only, no torch."""
