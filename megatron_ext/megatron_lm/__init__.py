"""Scripts of a Megatron-LM checkout with the engine of this package; see docs/megatron_scripts.md."""
