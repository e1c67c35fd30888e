"""Our own directory: a header, safetensors, the tokenizer."""
