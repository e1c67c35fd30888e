"""Speculative decoding: drafters and checks of their proposals."""
