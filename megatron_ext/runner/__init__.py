"""Preparation of a scheduled step and choice of its tokens: input tensors, logits, sampling. Needs torch only."""
