"""Commands of the console script `megatron-ext`."""
