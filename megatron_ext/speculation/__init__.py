"""Speculative decoding: who proposes drafts, and what becomes of proposals."""
