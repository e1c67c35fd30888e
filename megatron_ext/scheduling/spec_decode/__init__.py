"""Speculative decoding in the scheduler: number of drafts to verify, acceptance, and slots for their states."""
