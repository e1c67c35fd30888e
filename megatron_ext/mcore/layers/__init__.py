"""Layers of megatron-core's models that need nothing but torch."""
