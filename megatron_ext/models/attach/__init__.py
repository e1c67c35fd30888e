"""Attachment to Megatron's models in memory: their computation is checked, and a model of ours shares their tensors."""
