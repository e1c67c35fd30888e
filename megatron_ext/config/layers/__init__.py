"""Letters of layers, and patterns of them."""
