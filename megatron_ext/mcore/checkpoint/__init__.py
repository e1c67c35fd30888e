"""Checkpoints of megatron-core and torch, read as data; which part of each weight a rank holds."""
