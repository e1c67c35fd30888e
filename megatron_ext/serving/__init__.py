"""Running prompts: reading them, submitting them to the engine, reporting what became of them."""
