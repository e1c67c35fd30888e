"""Distributed checkpoints of Megatron: ours, and what Megatron-LM trained."""
