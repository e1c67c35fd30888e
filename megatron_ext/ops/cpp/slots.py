"""How kernels are told where the states of requests lie."""

from __future__ import annotations

from torch import Tensor


def place_of(slots: Tensor | slice) -> tuple[Tensor | None, int]:
    """The slots [R] and 0, or None and the first one where they follow each other."""
    if isinstance(slots, slice):
        assert slots.step in (None, 1), "one behind the other"
        return None, slots.start or 0
    return slots, 0
