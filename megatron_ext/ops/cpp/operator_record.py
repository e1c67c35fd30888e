"""Records of the operator calls of a function on the CPU, repeated in C++ without the function's Python code.

A record is right only if the function would make the same calls on the same memory again: all that changes from call to
call must be in tensors that exist before and are written in place. `record` refuses values that are read on the host,
shapes that depend on values, and results of unknown origin. Other inputs escape it, such as a number that Python
computes from something else; they make two records of one function differ, so compare their `signature`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_ext.ops import cpp

_HOST_READS = frozenset(
    {
        *(Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__array__, Tensor.__bool__, Tensor.__int__),
        *(Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.data_ptr, Tensor.__dlpack__),
    }
)


class OperatorRecord(Protocol):
    """Record of one function; an object of the C++ class of the same name. Used by one thread at a time."""

    def problem(self) -> str:
        """Return why the function cannot be repeated; empty if it can be."""

    def signature(self) -> str:
        """Return all calls with their arguments as text, tensors by geometry and by memory or by the call made them."""

    def is_current(self) -> bool:
        """Return whether the tensors that views were made of still have the memory that they had."""

    def replay(self) -> Tensor:
        """Repeat the calls and return a new tensor like the function's result."""


class _HostReads(TorchFunctionMode):
    """Notes values of tensors that Python reads.

    Attributes:
        found: Names of the functions that read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function; see `TorchFunctionMode`."""
        if func in _HOST_READS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def record(run: Callable[[], Tensor]) -> tuple[Tensor, OperatorRecord | None, str]:
    """Call a function and record its operator calls.

    Args:
        run: Returns a new tensor. Its calls are recorded in this thread only.

    Returns:
        The function's result; its record, or None if it cannot be repeated, and the reason.
    """
    cpp.kernels()  # the library has the class
    made = torch.classes.megatron_ext_cpu.OperatorRecord()
    reads = _HostReads()
    made.start()
    try:
        with reads:
            result = run()
    finally:
        made.stop()
    made.finish(result)
    problem = f"Tensor.{reads.found[0]}" if reads.found else made.problem()
    return result, None if problem else made, problem
