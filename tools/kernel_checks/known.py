"""Limits that kernels break today; the goal is an empty set."""

KNOWN = frozenset(
    {
        ("copy_states", "useful"),
        ("merge_splits", "bytes"),
        ("paged_decode_split", "bytes"),
        ("paged_decode_split", "useful"),
        ("paged_prefill", "depth"),
    }
)
"""(kernel, problem)."""
