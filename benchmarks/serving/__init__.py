"""Benchmark of a model in our engine, or of any OpenAI server, under shared prefixes, chats or unrelated prompts."""
