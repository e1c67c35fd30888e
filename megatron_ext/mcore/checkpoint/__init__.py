"""Checkpoints of megatron-core and torch, read as data, and the shard of each weight that a rank holds."""
