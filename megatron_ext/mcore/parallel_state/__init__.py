"""megatron-core's process groups, and the ranks that they describe."""
