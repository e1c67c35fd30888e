"""Metadata of a step, and the data that operator backends derive from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")
Own = TypeVar("Own", bound="StepMetadata")


class StepMetadata:
    """Base of frozen dataclasses with the layout of one step: lengths, cumulative lengths, block tables.

    The metadata is the same for every backend. Derived data of a backend (gather indices, padded layouts, tiles) is
    computed when its first layer requests it, and shared by all later layers of the step.
    """

    def prepared(self: Own, make: Callable[[Own], Made]) -> Made:
        """Return `make(self)`, computed once and cached."""
        made = self.__dict__.setdefault("_prepared", {})
        if make not in made:
            made[make] = make(self)
        return made[make]

    def provide(self: Own, make: Callable[[Own], Made], found: Made) -> None:
        """Set the result of `prepared(make)` to a value computed elsewhere, such as in static buffers."""
        self.__dict__.setdefault("_prepared", {})[make] = found
