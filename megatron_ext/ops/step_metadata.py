"""A step's facts, and what the backends of operators make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")
Own = TypeVar("Own", bound="StepMetadata")


class StepMetadata:
    """Base of frozen dataclasses that say where things lie in one step: lengths, cumulative lengths, block tables.

    Facts are the same for every backend. What one needs beside them (gather indices, padded layouts, tiles) it makes
    from them when its first layer asks, and every later layer of the step gets the same.
    """

    def prepared(self: Own, make: Callable[[Own], Made]) -> Made:
        """`make(self)`, called once however often it is asked for."""
        made = self.__dict__.setdefault("_prepared", {})
        if make not in made:
            made[make] = make(self)
        return made[make]

    def provide(self: Own, make: Callable[[Own], Made], found: Made) -> None:
        """Let `prepared(make)` give this: whoever staged the facts has made it, in places of its own."""
        self.__dict__.setdefault("_prepared", {})[make] = found
