"""Tool calls in generated text: formats of model families, an incremental parser, and grammars that force calls."""
