"""Limits that kernels break today; the goal is an empty set."""

KNOWN = frozenset(
    {
        ("merge_splits", "bytes"),
        ("paged_decode_split", "bytes"),
        ("paged_prefill", "depth"),
    }
)
"""(kernel, problem)."""
