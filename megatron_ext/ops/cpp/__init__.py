"""C++ operators for CPUs: compiled once on the machine that runs them, loaded once a process, called by name.

Each operator has its source in its own folder (`ops/<operator>/kernels.cpp`); shared code is in the headers here. All
sources are compiled together, each in its own namespace. A source registers functions as
`torch.ops.megatron_ext_cpu.<name>`. Torch sets the number of threads as everywhere else; no result depends on it.
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
from megatron_ext.ops.cpp.library_build import BuildError, compiler, open_library

SWITCH = "MEGATRON_EXT_CPP"
"""Environment variable: "auto" (default; without a library the reference computes), "off", or "required"."""
NAME = "cpp"
"""Name of the backends that use these kernels."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Supported types of inputs and states; sums are in fp32."""
_LOCK = threading.RLock()


class Kernels:
    """Functions of the library, by the names that their sources register; each is looked up once."""

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        function: Callable[..., Tensor] = getattr(torch.ops.megatron_ext_cpu, name).default
        setattr(self, name, function)
        return function


def say(line: str) -> None:
    """Print a progress line to stderr, if there is one; among several ranks only the first prints."""
    if sys.stderr is not None and os.environ.get("RANK", "0") in ("", "0"):
        print(f"megatron_ext: {line}", file=sys.stderr, flush=True)


@functools.cache
def _problem() -> str | None:
    """Return why this process has no library; None if it is loaded. Builds the library if necessary."""
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
        raise ConfigError(f"{SWITCH}={wanted}: it must be auto, off or required")
    if wanted == "off":
        return False
    problem = _problem()
    if problem is None:
        return True
    if wanted == "required":
        raise ConfigError(f"{SWITCH}=required: {problem}")
    say(f"operators run in plain torch, which is slower, because {problem}")
    return False


@functools.cache
def are_used() -> bool:
    """Return whether these kernels compute operators on the CPU; the first call builds and loads them.

    Reports once, on stderr, why they are not used, unless they are switched off.

    Raises:
        ConfigError: The kernels are required but not available, or the environment variable has an invalid value.
    """
    with _LOCK:  # concurrent threads wait for one result
        return _choose()


def can_be_built() -> bool:
    """Return whether this machine has a compiler, without building anything; for tests."""
    return compiler() is not None


def takes(x: Tensor) -> bool:
    """Return whether the kernels support inputs like this one: on the CPU, in fp32 or 16 bits, without gradients."""
    if not x.is_cpu or x.dtype not in DTYPES:
        return False
    return not (x.requires_grad and torch.is_grad_enabled()) and are_used()


@functools.cache
def kernels() -> Kernels:
    """Return the functions of the library, even if the environment variable switches them off.

    Raises:
        RuntimeError: There is no library; the message says why.
    """
    with _LOCK:
        problem = _problem()
    if problem is not None:
        raise RuntimeError(problem)
    return Kernels()


def move_to_large_pages(weight: Tensor) -> int:
    """Move the memory of a weight on the CPU to large pages, where the system has them.

    Small pages are read at three fourths of the rate, since more of them are looked up.

    Returns:
        Bytes that the system was asked for: all of the weight but parts of pages at its ends.
    """
    return int(kernels().move_to_large_pages(weight)) if are_used() else 0
