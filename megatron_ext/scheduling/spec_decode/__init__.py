"""Drafts of decoding requests: how many are verified, which are accepted, where their states lie."""
