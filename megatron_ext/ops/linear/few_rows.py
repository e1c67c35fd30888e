"""Products of few rows by a library, with rows of zeros after them, so that a row's bits do not depend on their number.

Libraries add up the products of a single row in another order than with several rows. Sums that differ in their last
bit of fp32 are now and then rounded to other numbers of 16 bits, so that a row that verifies drafts would not have the
logits of a decode step. On CPUs with AVX512_BF16 four rows of bf16 also take less time than one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.linear import table

FEWEST_ROWS: Final = 4
_MOST_INPUTS: Final = 1024  # of a single row that oneDNN adds up in the same order as several rows
_MEASURED: Final = (table.AVX512_BF16, "AVX512", "AVX2")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, whose bits in bf16 do not depend on the number of rows."""
    if depends_on_rows(x):
        return with_rows(lambda rows: F.linear(rows, weight, bias), x)
    return F.linear(x, weight, bias)


def depends_on_rows(x: Tensor) -> bool:
    """Return whether the bits of oneDNN's product of a row of x [..., i] in bf16 depend on the number of rows."""
    return x.dtype is torch.bfloat16 and x.is_cpu and x.shape[-1] > _MOST_INPUTS and _has_avx512()


def rows_are_independent(weight: Tensor) -> bool:
    """Return whether a row's bits in products with a weight of this type were measured to depend on no other row."""
    is_measured = table.instruction_sets(weight.dtype)[0] in _MEASURED
    return weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float16) and is_measured


def with_rows(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `multiply(x)`, [..., i] -> [..., o], computed for `FEWEST_ROWS` rows at least."""
    count = x.shape[:-1].numel()
    if not 0 < count < FEWEST_ROWS:
        return multiply(x)
    rows = F.pad(x.reshape(count, -1), (0, 0, 0, FEWEST_ROWS - count))
    return multiply(rows)[:count].reshape(*x.shape[:-1], -1)


@functools.cache
def _has_avx512() -> bool:
    return table.instruction_sets(torch.float32)[0] == "AVX512"
