"""OpenAI's API over an engine in a thread of its own; see docs/server.md and docs/operating.md."""
