"""Operators in C++ for CPUs: compiled once on the machine that runs them, loaded once a process, asked for by name.

Each operator has its source in its own folder (`ops/<operator>/kernels.cpp`); what they share are the headers here. All
are compiled as one: a source has a namespace of its own. It registers functions as `torch.ops.megatron_ext_cpu.<name>`.
How many threads there are is torch's business as everywhere else; no result depends on it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.ops.cpp.build import BuildError, compiler, open_library

SWITCH = "MEGATRON_EXT_CPP"
"""Environment variable: "auto" (default; without a library the reference computes), "off", or "required"."""
NAME = "cpp"
"""Of the backends that are made of these kernels."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What inputs and states may be of; sums are in fp32."""
_LOCK = threading.RLock()


class Kernels:
    """The functions of the library, by the names that their sources register; each is looked up once."""

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] = getattr(torch.ops.megatron_ext_cpu, name).default
        setattr(self, name, function)
        return function


def say(line: str) -> None:
    """A line for whoever waits, where there is somewhere to write it; of several ranks the first one writes."""
    if sys.stderr is not None and os.environ.get("RANK", "0") in ("", "0"):
        print(f"megatron_ext: {line}", file=sys.stderr, flush=True)


@functools.cache
def _problem() -> str | None:
    """Why this process has no library; None if it is loaded. Builds it where need be."""
    try:
        library = open_library(say)
    except BuildError as error:
        return str(error)
    try:
        library.load()
    except OSError as error:
        library.close()
        return f"{library.path} cannot be loaded ({error}); without that file it is compiled again"
    return None


@functools.cache
def _choose() -> bool:
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in ("auto", "off", "required"):
        raise ConfigError(f"{SWITCH}={wanted}: it is auto, off or required")
    if wanted == "off":
        return False
    problem = _problem()
    if problem is None:
        return True
    if wanted == "required":
        raise ConfigError(f"{SWITCH}=required: {problem}")
    say(f"operators run in plain torch, which is slower: {problem}")
    return False


@functools.cache
def are_used() -> bool:
    """Whether operators on the CPU are computed by the kernels here; builds and loads them when first asked.

    Says once, on stderr, why they are not, unless it was asked for.

    Raises:
        ConfigError: They are required and cannot be had, or the environment variable has a value that it cannot have.
    """
    with _LOCK:  # threads that ask at once wait for one answer
        return _choose()


def can_be_built() -> bool:
    """Whether this machine has a compiler, without building anything; for tests."""
    return compiler() is not None


def takes(x: Tensor) -> bool:
    """Whether the kernels compute for inputs like this one: on the CPU, in fp32 or 16 bits, without gradients."""
    if not x.is_cpu or x.dtype not in DTYPES:
        return False
    return not (x.requires_grad and torch.is_grad_enabled()) and are_used()


@functools.cache
def kernels() -> Kernels:
    """The functions of the library, also where the environment says that they are not to be used.

    Raises:
        RuntimeError: There is no library, and why.
    """
    with _LOCK:
        problem = _problem()
    if problem is not None:
        raise RuntimeError(problem)
    return Kernels()
