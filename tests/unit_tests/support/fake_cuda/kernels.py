"""Triton's kernels on the fake device: interpreted, on the memory itself; none in a process that compiles."""

from __future__ import annotations

import os

import torch

from megatron_ext.ops import triton
from tests.unit_tests.support.fake_cuda import watching


def install() -> None:
    """Let backends find kernels in a process with TRITON_INTERPRET=1, and none in another."""
    triton.problem = _problem
    if os.environ.get(triton.INTERPRET) == "1":
        _interpret_in_place()


def _problem(device: torch.device) -> str | None:
    missing = triton._import_problem()
    if missing is not None:
        return missing
    return None if triton.is_interpreted() else f"the device is pretended, and {triton.INTERPRET}=1 is not there"


def _interpret_in_place() -> None:
    """The interpreter would copy every tensor to the host and back."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launch(self: GridExecutor, *arguments: object, **more: object) -> None:
        watching.STATE.launched(lambda: run(self, *arguments, **more))
        run(self, *arguments, **more)

    GridExecutor.__call__ = launch
    GridExecutor._init_args_hst = lambda self, arguments, more: (arguments, more)
    GridExecutor._restore_args_dev = lambda self, arguments, on_host, more, more_on_host: None
