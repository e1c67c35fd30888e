"""Layers of megatron-core's models that need only torch."""
