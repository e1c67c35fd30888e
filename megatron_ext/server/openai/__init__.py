"""OpenAI requests and responses."""
