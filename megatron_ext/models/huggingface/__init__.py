"""Hugging Face checkpoints: configurations and weights of the known families."""
