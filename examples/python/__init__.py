"""Programs that use the engine; tests run each of them."""
