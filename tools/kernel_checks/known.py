"""Limits that kernels break today; the goal is an empty set."""

KNOWN: frozenset[tuple[str, str]] = frozenset()
"""(kernel, problem)."""
