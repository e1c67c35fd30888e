"""megatron-core 0.19.2 as a peer: run in a process of its own, whose first package of that name is that version."""
