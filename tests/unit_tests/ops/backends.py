"""Which backends of an operator can be tested on this machine."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.mcore import platform
from megatron_ext.ops import cpp, triton
from megatron_ext.ops.backends import Backends


def usable(backends: Backends) -> list[str]:
    """All names but the C++ one's where there is no compiler, or where models live on a GPU; nothing is built.

    Triton's are tested where it can be imported: on the CPU under its interpreter.
    """
    device = platform.device()
    missing = set()
    if not (cpp.can_be_built() and device.type == "cpu"):
        missing.add(cpp.NAME)
    if triton.problem(device) is not None:
        missing.add(triton.NAME)
    return [name for name in backends.names if name not in missing]


def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of tests that are too long for Triton's interpreter: with its backend they need the mark `kernels`."""
    return (pytest.mark.kernels,) if name == triton.NAME and triton.is_interpreted() else ()


def params(backends: Backends) -> list[Any]:
    """Usable backends as parameters; a kernel under Triton's interpreter has the mark `long`."""
    return [pytest.param(name, marks=interpreted(name)) for name in usable(backends)]


def interpreted(name: str) -> tuple[pytest.MarkDecorator, ...]:
    """Mark `long` for the backend whose kernels run under Triton's interpreter."""
    return (pytest.mark.long,) if name == triton.NAME and triton.is_interpreted() else ()
