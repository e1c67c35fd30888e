"""Compatibility with Megatron-LM's launch scripts: flags without a field here, and YAML files of its tests."""
