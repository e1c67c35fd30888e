"""megatron-core's process groups, and the rank info read from them."""
