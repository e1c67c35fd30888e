"""megatron_ext: prefix caching for hybrid Transformer-Mamba models on megatron-core's dynamic engine."""

__version__ = "0.1.0"
