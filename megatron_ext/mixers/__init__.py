"""Recurrent layers as megatron-core modules: one varlen prefill call and one decode call a step."""
