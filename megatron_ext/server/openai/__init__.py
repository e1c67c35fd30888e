"""OpenAI's requests and responses."""
