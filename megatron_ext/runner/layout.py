"""Layout of a step's arrays in one buffer, so that one copy takes all of them to the device or back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Names and shapes of consecutive arrays; those named in `fractions` are float64, all others int64."""

    shapes: Mapping[str, Shape]
    fractions: frozenset[str]

    def __or__(self, other: Layout) -> Layout:
        """Return a layout with the arrays of another one after its own."""
        return Layout({**self.shapes, **other.shapes}, self.fractions | other.fractions)

    @cached_property
    def count(self) -> int:
        """Numbers of all arrays together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def first(self, name: str) -> int:
        """Return the index of an array's first number."""
        before = list(self.shapes)[: list(self.shapes).index(name)]
        return sum(math.prod(self.shapes[one]) for one in before)

    def parts(self, whole: Tensor) -> dict[str, Tensor]:
        """Return views of an int64 buffer, by name."""
        parts = whole[: self.count].split([math.prod(shape) for shape in self.shapes.values()])
        return {
            name: (part.view(torch.float64) if name in self.fractions else part).view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
