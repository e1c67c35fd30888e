"""Sampling options of each row of a step's logits, on the device and on the host, the same for every backend.

R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from megatron_ext.ops.step_metadata import StepMetadata


class SamplingMetadata(NamedTuple):
    """Sampling options of R rows, on the device.

    Attributes:
        temperature: [R] float64, positive.
        top_k: [R] int64, 0 is off.
        top_p: [R] float64 in [0, 1]; 0 and 1 are off.
        uniform: [R] float64 in [0, 1); negative for greedy rows.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


@dataclass(frozen=True)
class SamplingBatch(StepMetadata):
    """Sampling options of R rows, on the host, so that no backend reads anything back to choose its code path.

    Attributes:
        temperature: [R] float64, positive.
        top_k: [R] int64, 0 is off.
        top_p: [R] float64 in [0, 1]; 0 is off, and so is 1, since it keeps every possible token.
        uniform: [R] float64 in [0, 1], one draw of each request's own generator.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    uniform: np.ndarray

    def __post_init__(self) -> None:
        assert bool((self.temperature > 0).all()), "a row with temperature 0 is greedy, and not drawn"


def sampling_batch(
    temperature: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], uniform: Sequence[float]
) -> SamplingBatch:
    """Build a `SamplingBatch`; each sequence has one entry per row."""
    return SamplingBatch(
        np.asarray(temperature, dtype=np.float64),
        np.asarray(top_k, dtype=np.int64),
        np.asarray(top_p, dtype=np.float64),
        np.asarray(uniform, dtype=np.float64),
    )
