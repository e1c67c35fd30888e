"""Committed table: which weights of linear layers a backend packs, by instruction set, type and shape.

`python -m benchmarks operators.linear` measures every row beside `F.linear` and prints what the table should say on the
CPU that it runs on; nothing is timed when an engine starts. So ranks and replicas on equal machines choose alike. A
machine whose instruction set has no row computes with `F.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MIB: Final = 1024**2


@dataclass(frozen=True)
class Row:
    """Weights that a backend packs.

    Attributes:
        instruction_set: Name that `torch.backends.cpu.get_cpu_capability` has for it.
        dtype: Type of the weight.
        min_inputs: Smallest number of inputs.
        min_bytes: Smallest size of the weight; smaller ones stay in the CPU's caches anyway.
        backend: Name of the backend.
        measured_on: CPU, cores and torch of the measurement.
    """

    instruction_set: str
    dtype: torch.dtype
    min_inputs: int
    min_bytes: int
    backend: str
    measured_on: str

    @property
    def limits(self) -> str:
        """Limits of the weights that the row is for, as a text."""
        return f"from {self.min_inputs} inputs and {self.min_bytes} bytes on"

    def packs(self, outputs: int, inputs: int) -> bool:
        """Return whether the row is for weights of this shape."""
        return inputs >= self.min_inputs and outputs * inputs * self.dtype.itemsize >= self.min_bytes


TABLE: Final = (
    Row("AVX512", torch.float32, 256, MIB, "onednn", "AMD EPYC, family 26 (Zen 5), 2 cores, torch 2.13.0"),
    Row("AVX2", torch.float32, 256, MIB, "onednn", "AMD EPYC with AVX2, 2 cores, torch 2.13.0"),
)


def instruction_set() -> str:
    """Return the name of the instruction set that torch uses on this CPU."""
    return torch.backends.cpu.get_cpu_capability()


def row_for(dtype: torch.dtype, rows: tuple[Row, ...] = TABLE) -> Row | None:
    """Return the row of this CPU's instruction set, as torch uses it, and of a type; None without one."""
    found = instruction_set()
    return next((row for row in rows if row.instruction_set == found and row.dtype is dtype), None)


def packs(weight: Tensor, backend: str) -> bool:
    """Return whether the table says that this backend packs a weight [o, i]."""
    row = row_for(weight.dtype)
    if row is None or row.backend != backend:
        return False
    outputs, inputs = weight.shape
    return row.packs(outputs, inputs)
