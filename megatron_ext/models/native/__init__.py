"""Our own checkpoint directory: a header, safetensors, the tokenizer."""
