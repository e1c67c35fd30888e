"""Shared parts of the Triton operators, for CUDA devices. This module imports without triton; kernels do not.

An operator has its kernels, registered by `kernel_registry.kernel`, and their launchers in its own folder
(`ops/<operator>/kernels.py`), in a module that is imported on first use. On a machine without a GPU the same kernels
run on CPU tensors under Triton's interpreter, which a process uses from its start or not at all (`TRITON_INTERPRET=1`
before triton is imported): for tests, thousands of times slower.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ext.ops.backends import AUTO, FunctionBackend

NAME = "triton"
"""Name of the backends that use these kernels."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported types of inputs and states; sums are in fp32."""
INTERPRET = "TRITON_INTERPRET"
"""Environment variable of Triton's: "1" makes the kernels of the process run on CPU tensors, by numpy."""
OLDEST = (8, 0)
"""Compute capability of the oldest device that kernels are compiled for."""


@functools.cache
def _import_problem() -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if not hasattr(triton, "knobs"):
        return f"triton {triton.__version__} is too old; the kernels need 3.6 or 3.7"
    return None


def can_be_imported() -> bool:
    """Return whether a suitable triton can be imported; it is imported."""
    return _import_problem() is None


@functools.cache
def is_interpreted() -> bool:
    """Return whether the kernels of this process run on CPU tensors; False without triton."""
    if not can_be_imported():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def _device_problem(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if torch.version.cuda is None or capability < OLDEST:
        found, needed = (".".join(map(str, one)) for one in (capability, OLDEST))
        return f"the device has compute capability {found}; the kernels are compiled for {needed} and newer"
    return None


def problem(device: torch.device) -> str | None:
    """Return why kernels cannot run on a device in this process; None if they can."""
    missing = _import_problem()
    if missing is not None:
        return missing
    if is_interpreted():
        return None if device.type == "cpu" else f"{INTERPRET}={os.environ.get(INTERPRET)} is for CPU tensors"
    if device.type == "cuda":
        return _device_problem(torch.cuda.current_device() if device.index is None else device.index)
    return f"kernels run on CUDA devices; on {device.type} with {INTERPRET}=1 in the environment only, for tests"


def takes(x: Tensor) -> bool:
    """Return whether kernels are chosen by default for inputs like this one: on a CUDA device, without gradients.

    CPU tensors are never chosen by default, not even under the interpreter: it is for tests, which force the backend.
    """
    if not x.is_cuda or x.dtype not in (*DTYPES, torch.int32) or (x.requires_grad and torch.is_grad_enabled()):
        return False  # int32: numbers of experts
    return problem(x.device) is None


def backend(package: str) -> FunctionBackend:
    """Return the backend of an operator's package: `launch_<name>` in `kernels.py` computes its function `name`."""

    def find(name: str) -> Callable[..., object] | None:
        return getattr(importlib.import_module(f"{package}.kernels"), f"launch_{name}", None)

    return FunctionBackend(NAME, takes, find)


def compiles(device: torch.device, preferred: str) -> bool:
    """Return whether operators launch kernels on a device that are compiled at their first launch.

    Args:
        device: Device of the operators' inputs.
        preferred: Name of the preferred backend, or AUTO; see `ops.backends.preferring`.
    """
    is_chosen = preferred in (AUTO, NAME) and device.type == "cuda"
    return is_chosen and not is_interpreted() and problem(device) is None


@functools.cache
def architecture(device: torch.device) -> int:
    """Return the compute capability of a CUDA device times ten; elsewhere an H100's 90, for the interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def padded(size: int, minimum: int = 16) -> int:
    """Return the power of two that a dimension is padded to in a kernel; matrix products need 16."""
    return max(minimum, 1 << (size - 1).bit_length())
