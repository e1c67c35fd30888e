"""Print the instruction sets of torch, numpy and this package's operators, and make oneDNN and MKL print theirs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from numpy._core._multiarray_umath import __cpu_baseline__, __cpu_dispatch__, __cpu_features__

from megatron_ext.ops import cpp


def openblas_core() -> str:
    """Return the CPU whose kernels the OpenBLAS in numpy's wheel uses."""
    for library in Path(np.__file__).parents[1].glob("numpy.libs/libscipy_openblas64_*"):
        ask = ctypes.CDLL(str(library)).scipy_openblas_get_corename64_
        ask.restype = ctypes.c_char_p
        return str(ask().decode())
    return "not in this numpy"


def main() -> None:
    """Print one line a library, with the prefix "uses "; multiply with oneDNN and MKL."""
    print("uses torch:", torch.backends.cpu.get_cpu_capability())
    print("uses our operators:", cpp.kernels().vectors() if cpp.are_used() else "none, plain torch")
    print("uses numpy:", *__cpu_baseline__, *(one for one in __cpu_dispatch__ if __cpu_features__[one]))
    print("uses OpenBLAS:", openblas_core(), flush=True)
    torch.ones(8, 8).to_mkldnn().relu()
    torch.ones(8, 8) @ torch.ones(8, 8)


if __name__ == "__main__":
    main()
