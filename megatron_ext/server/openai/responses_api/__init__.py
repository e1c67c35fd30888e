"""OpenAI's Responses API: bodies, conversations, typed events, and stored responses."""
