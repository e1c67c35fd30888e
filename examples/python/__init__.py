"""How programs use the engine; tests run each of them."""
