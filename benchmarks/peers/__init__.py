"""Identical work for this engine, transformers and vLLM, each in a process and an environment of its own."""
