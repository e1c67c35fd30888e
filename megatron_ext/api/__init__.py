"""The package as a library: what `import megatron_ext` offers."""
