"""Checkpoints in Megatron's distributed format, written by this package or by Megatron-LM."""
