"""Cases of latency that peers share: the same prompts served by this engine, by transformers and by vLLM."""
