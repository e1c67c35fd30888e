"""Throughput: tokens a second, beside transformers, with drafts, on several ranks and on shared cores."""
