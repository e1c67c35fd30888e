"""Hugging Face checkpoints: configurations and weights of the families we know."""
