"""Linear layers by oneDNN with packed weights, on CPUs: torch ships the library.

`F.linear` takes MKL, which packs a weight anew in each call, and for few rows reads it slowly. The packed layout
depends on a hint, the expected number of rows; one made for few rows serves all counts. In fp32 our C++ kernel reads
the same memory for up to four rows, in half to two thirds of the time (`onednn_panels.cpp`).
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.linear import table
from megatron_ext.ops.linear.few_rows import depends_on_rows, with_rows
from megatron_ext.ops.linear.reference import LinearBackend

NAME: Final = "onednn"
_ROWS_HINT: Final = 8
FEW_ROWS: Final = 4  # of `onednn_panels.cpp`
_PACK, _PRODUCT = "_reorder_linear_weight", "_linear_pointwise"  # private names of torch, present since 2.0


@functools.cache
def problem() -> str | None:
    """Return why this torch cannot pack weights; None if it can."""
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    missing = [name for name in (_PACK, _PRODUCT) if not hasattr(torch.ops.mkldnn, name)]
    return f"torch {torch.__version__} has no torch.ops.mkldnn.{missing[0]}" if missing else None


def dtypes() -> tuple[torch.dtype, ...]:
    """Return the types of weights that oneDNN packs on this CPU; without instructions for it, bf16 would be slow."""
    has_bf16 = table.AVX512_BF16 in table.instruction_sets(torch.bfloat16)
    return (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)


def supports(weight: Tensor) -> bool:
    """Return whether weights of this device, type and rank can be packed."""
    return weight.is_cpu and weight.dtype in dtypes() and weight.dim() == 2 and problem() is None


@functools.cache
def few_rows_by_cpp() -> bool:
    """Return whether our C++ kernel computes few rows here: it was built, and knows oneDNN's layout."""
    is_known = bool(OneDnnWeight(torch.arange(8192.0).view(128, 64)).panel_inputs)
    if cpp.are_used() and not is_known:
        cpp.say("oneDNN lays weights out in another way than our kernel reads; it computes steps of few rows, too")
    return is_known


def takes(weight: Tensor) -> bool:
    """Return whether the committed table says that a weight is to be packed on this CPU.

    Small weights gain only by our C++ kernel: oneDNN alone is slower than `F.linear` there.
    """
    if not supports(weight) or not table.packs(weight, NAME):
        return False
    return weight.dtype is not torch.float32 or weight.nbytes >= table.MIB or few_rows_by_cpp()


class OneDnnWeight:
    """Weight that oneDNN has packed; see `PackedWeight`.

    Args:
        weight: [o, i], of one of `dtypes`.

    Attributes:
        panel_inputs: Inputs of a panel, zeros included, if our C++ kernel computes few rows; else 0.
    """

    def __init__(self, weight: Tensor) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            weight = weight.detach().contiguous()
            self._weight = getattr(torch.ops.mkldnn, _PACK)(weight, _ROWS_HINT)
        cpp.move_to_large_pages(self._weight)
        self.panel_inputs = cpp.kernels().onednn_panels(self._weight, weight) if cpp.are_used() else 0
        if self.panel_inputs:
            self._few = cpp.kernels().linear_of_few_rows
        self._product = getattr(torch.ops.mkldnn, _PRODUCT).default

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product [..., o] of x [..., i]; without gradients."""
        if depends_on_rows(x):
            return with_rows(lambda rows: self._multiply(rows, bias), x)
        return self._multiply(x, bias)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.panel_inputs and x.shape[:-1].numel() <= FEW_ROWS and x.dtype is torch.float32:
            return self._few(x, self._weight, self.panel_inputs, bias)
        output: Tensor = self._product(x, self._weight, bias, "none", [], "")
        return output

    def dense(self) -> Tensor:
        """Return a copy of the original weight [o, i]."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return self._weight.to_dense()


BACKEND = LinearBackend(NAME, takes, OneDnnWeight)
