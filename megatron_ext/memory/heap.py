"""Heap settings of the C library and of Python's garbage collector.

By default glibc returns the freed tensors of a step to the system one by one. Every step allocates the same tensors
again, and page faults and clearing take a tenth of a long prefill's time on CPUs, or more. `keep_freed_memory` makes
glibc keep freed memory. For threads this also takes a single heap: heaps of threads are trimmed at any threshold, and a
server runs its steps in a thread.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from functools import cache

import torch

KEPT_BYTES = 1 << 30  # kept at the end of the heap; tensors larger than that are still mapped separately
# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of glibc's malloc.h.
_OPTIONS = ((-1, KEPT_BYTES), (-3, KEPT_BYTES), (-8, 1))
# Environment variables that take precedence over the options here.
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations of this process; return whether it does.

    Does nothing if the library is not glibc, or if the environment sets the allocator's options. Calling it again
    changes nothing; threads that have a heap of their own keep it.
    """
    library = _glibc()
    if library is None or any(name in os.environ for name in _CHOSEN):
        return False
    done = [library.mallopt(option, value) for option, value in _OPTIONS]
    return all(done)


def give_back_freed_memory() -> None:
    """Return freed memory to the system, after pools were freed or before free memory is measured.

    This includes the memory that torch caches on a CUDA device, which otherwise counts as used.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    """Return the C library of this process if it is glibc, else None."""
    if platform.libc_ver()[0] != "glibc":
        return None
    library = ctypes.CDLL(None)
    library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library


def freeze_loaded_objects() -> None:
    """Exclude all current objects from Python's cyclic garbage collection for the rest of the process.

    Libraries and a model are half a million objects. A full collection stops every thread for some tenths of a second,
    each time that a quarter as many objects have been added, and stalls streams. Objects without references are freed
    as before, unless they are part of a cycle that exists now.
    """
    gc.collect()
    gc.freeze()
