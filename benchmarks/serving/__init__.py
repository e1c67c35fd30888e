"""Serving: figures of one's own model or of any server, and of this server under many streams."""
