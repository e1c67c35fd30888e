"""Anthropic's Messages API: its requests as chat requests of this server, and the answers as its objects."""
