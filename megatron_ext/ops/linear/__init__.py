"""Products with the weight of a linear layer, which a backend may keep in a layout of its own.

A backend is chosen once a weight, not once a call: a packed weight replaces the original, so it serves every number of
rows. `table.py` says which weights are packed on which CPUs; `--operator-backend` overrides it.

    with preferring(name):
        pack = choose(weight).pack            # None: the weight stays as it is, and F.linear computes
    packed = pack(weight)
    packed(x, bias)                           # F.linear(x, weight, bias), within the rounding of sums in another order
    packed.dense()                            # the weight, to the bit

`INT8` quantizes weights, an approximation that only `--cpu-weight-quantization` chooses.

Letters: o outputs, i inputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.ops.backends import Backends
from megatron_ext.ops.linear import cpp, onednn, reference, table
from megatron_ext.ops.linear.cpp import INT8
from megatron_ext.ops.linear.packable import Packable, PackableLinear
from megatron_ext.ops.linear.reference import LinearBackend, PackedWeight

LINEAR = Backends("linear", onednn.BACKEND, cpp.BACKEND, reference.BACKEND)


def choose(weight: Tensor) -> LinearBackend:
    """Return the backend for a weight [o, i]: forced or preferred, else named by the table.

    Raises:
        ConfigError: The preferred backend cannot pack weights of this device or type.
    """
    backend = LINEAR.choose(weight)
    if backend is onednn.BACKEND and not onednn.supports(weight):
        types = " and ".join(str(one).removeprefix("torch.") for one in onednn.dtypes())
        found = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"--operator-backend {backend.name} packs weights of {types} on CPUs, and the model's are {found} on "
            f"{weight.device.type}; auto and reference work here"
        )
    return backend


def choice_identity(backend: LinearBackend, dtype: torch.dtype, *, is_forced: bool) -> str:
    """Return all that the results of packed weights depend on, beside the weights: equal texts, equal choices.

    Args:
        backend: Backend that packs.
        dtype: Type of the weights.
        is_forced: Whether the backend packs every weight instead of only the weights in the table.
    """
    row = None if is_forced else table.row_for(dtype)
    is_fp32 = backend is onednn.BACKEND and dtype is torch.float32
    few = ", few rows by cpp" if is_fp32 and onednn.few_rows_by_cpp() else ""
    return f"{backend.name}{few} {table.instruction_sets(dtype)[0]} {dtype} {'all' if row is None else row.limits}"


__all__ = ["INT8", "LINEAR", "LinearBackend", "Packable", "PackableLinear", "PackedWeight", "choice_identity", "choose"]
