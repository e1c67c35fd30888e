"""Megatron-LM's launch scripts: flags that have no field of ours, and YAML files of its functional tests."""
