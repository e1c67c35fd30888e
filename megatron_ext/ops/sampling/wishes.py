"""What rows ask for, where the device has it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Wishes(NamedTuple):
    """What R rows ask for, on the device.

    Attributes:
        temperature: [R] float64, positive.
        top_k: [R] int64, 0 is off.
        top_p: [R] float64 in [0, 1]; 0 and 1 are off.
        uniform: [R] float64 in [0, 1); below zero the row is greedy.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor
