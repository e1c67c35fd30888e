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

KIB: Final = 1024
MIB: Final = 1024**2
AMX, AVX512_BF16 = "AMX", "AVX512_BF16"
_INSTRUCTIONS_OF_BF16: Final = ((AMX, "_is_amx_tile_supported"), (AVX512_BF16, "_is_avx512_bf16_supported"))
"""Names, most specific first, and the functions of `torch.cpu` that ask the CPU; private names of torch."""


@dataclass(frozen=True)
class Row:
    """Weights that a backend packs.

    Attributes:
        instruction_set: One of `instruction_sets`.
        dtype: Type of the weight.
        min_inputs: Smallest number of inputs.
        min_bytes: Smallest size of the weight; packing a smaller one is not faster.
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


_EPYC = "AMD EPYC, family 26 (Zen 5), 2 cores, torch 2.13.0"
_LOWERED = f"{_EPYC}, lowered to AVX2"
TABLE: Final = (
    Row("AVX512", torch.float32, 256, 128 * KIB, "onednn", _EPYC),
    Row("AVX2", torch.float32, 256, 256 * KIB, "onednn", _LOWERED),
    Row(AVX512_BF16, torch.bfloat16, 256, MIB, "onednn", _EPYC),
    Row("AVX512", torch.bfloat16, 64, 32 * KIB, "cpp", _EPYC),
    Row("AVX2", torch.bfloat16, 64, 32 * KIB, "cpp", _LOWERED),
    Row("AVX512", torch.float16, 64, 32 * KIB, "cpp", _EPYC),
    Row("AVX2", torch.float16, 64, 32 * KIB, "cpp", _LOWERED),
)


def instruction_sets(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the instructions that products of a type have on this CPU, the most specific one first.

    The last one is torch's own name; a CPU that is lowered to less than AVX-512 has no other.
    """
    found = torch.backends.cpu.get_cpu_capability()
    if dtype is not torch.bfloat16 or found != "AVX512":
        return (found,)
    return (*(name for name, ask in _INSTRUCTIONS_OF_BF16 if getattr(torch.cpu, ask, lambda: False)()), found)


def row_for(dtype: torch.dtype, rows: tuple[Row, ...] | None = None) -> Row | None:
    """Return the row of this CPU's most specific instruction set that has one, and of a type; None without one."""
    of_type = {row.instruction_set: row for row in (TABLE if rows is None else rows) if row.dtype is dtype}
    return next((of_type[name] for name in instruction_sets(dtype) if name in of_type), None)


def packs(weight: Tensor, backend: str) -> bool:
    """Return whether the table says that this backend packs a weight [o, i]."""
    row = row_for(weight.dtype)
    if row is None or row.backend != backend:
        return False
    outputs, inputs = weight.shape
    return row.packs(outputs, inputs)
