"""Models of Megatron in memory: what they compute is checked, and a model of ours shares their tensors."""
