"""Metadata of a step: its copy to the device, and the data that operator backends derive from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

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


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """Copy a host tensor to a device; returns the tensor itself if the device is the host.

    Copies to CUDA go through pinned memory, which torch reuses only after the copy is done: any other copy waits for
    all previously enqueued work.
    """
    if device is None or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
