"""How a scheduled step is prepared, and its tokens are chosen: input tensors, logits, sampling. Needs torch only."""
