"""Distributed checkpoints of Megatron: ours, and those that Megatron-LM trained."""
