"""Load generator: prompts with shared prefixes, chats and unique prompts for an engine or any OpenAI server."""
