"""Library interface: the names that `import megatron_ext` exports."""
