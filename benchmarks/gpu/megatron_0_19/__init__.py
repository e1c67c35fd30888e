"""Adapter of megatron-core 0.19.2: run in a process whose first package of that name is that version."""
