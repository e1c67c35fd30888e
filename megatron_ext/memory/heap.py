"""What the C library does with memory that was freed: by default a step's tensors go back to the system one by one.

Every step asks for the same tensors again, so that each of its pages is faulted in and cleared again: a tenth of a long
prefill's time on CPUs, and more. Where the C library is glibc, `keep_freed_memory` lets it keep them. In threads that
takes one heap for all of them as well: heaps of threads are cut short whatever the thresholds are, and a server steps
in a thread.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
from functools import cache

import torch

logger = logging.getLogger(__name__)

KEPT_BYTES = 1 << 30  # what may stay at the end of the heap; larger tensors than that are still mapped by themselves
# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of glibc's malloc.h.
_OPTIONS = ((-1, KEPT_BYTES), (-3, KEPT_BYTES), (-8, 1))
# Whoever has set one of these has chosen already.
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for what this process allocates next; whether it does.

    Nothing happens, and a line at debug level says so, where the library is not glibc, or where the environment says
    already how it allocates. Calling it again changes nothing; threads that have a heap of their own keep it.
    """
    library = _glibc()
    if library is None:
        logger.debug("the C library is not glibc: freed memory goes where the library sends it")
        return False
    chosen = [name for name in _CHOSEN if name in os.environ]
    if chosen:
        logger.debug("the heap is left as it is: the environment has %s", ", ".join(chosen))
        return False
    done = [library.mallopt(option, value) for option, value in _OPTIONS]
    if not all(done):
        logger.debug("glibc refused to keep freed memory")
    return all(done)


def give_back_freed_memory() -> None:
    """Send what was freed and kept back to the system: pools that are gone, or before free memory is measured.

    What torch keeps of a CUDA device, too: it counts as taken there, for other processes and for who asks what is free.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library of this process; None if it is another one."""
    if platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def spare_what_is_loaded() -> None:
    """Let Python's collector of cycles pass over every object that is there now, for as long as the process lives.

    Libraries and a model are half a million objects. Looking at all of them stops every thread for some tenths of a
    second, each time when a quarter as many have been added: streams stood still for it. What is not referred to any
    more is freed as before, unless it is part of a cycle that is there now.
    """
    gc.collect()
    gc.freeze()
