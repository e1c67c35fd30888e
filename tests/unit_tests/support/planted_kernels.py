"""Kernels with one mistake each, and their sound counterparts, for tests of the checks of kernels."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def mostly_idle(x, n):
    """Programs from n on have no work."""
    if tl.program_id(0) < n:
        tl.store(x + tl.program_id(0), 1.0)


@triton.jit
def over_all_keys(x, n):
    """Each program passes over all n keys, twice."""
    total = 0.0
    for i in range(0, n, 32):
        for _ in range(2):
            total += tl.load(x + i)
    tl.store(x + tl.program_id(0), total)


@triton.jit
def while_over_all_keys(x, n):
    """Each program passes over all n keys, twice, in `while` loops."""
    total, i = 0.0, 0 * n
    while i < n:
        for _ in range(2):
            total += tl.load(x + i)
        i += 32
    tl.store(x + tl.program_id(0), total)


@triton.jit
def narrow_offset(x, n):
    """The offset overflows 32 bits."""
    tl.store(x + tl.program_id(0) * n, 1.0)


@triton.jit
def wide_offset(x, n):
    """The offset has 64 bits."""
    tl.store(x + tl.program_id(0).to(tl.int64) * n, 1.0)


@triton.jit
def both_write(x):
    """Two programs write the same cell."""
    tl.store(x + tl.program_id(0) // 2, 1.0)


@triton.jit
def one_reads(x):
    """A program reads the cell that the next one writes."""
    place = tl.program_id(0)
    tl.store(x + place, tl.load(x + place + 1, mask=place < 3, other=0.0))


@triton.jit
def separate(x):
    """Each program writes its own cell, and all read one that none writes."""
    place = tl.program_id(0)
    tl.store(x + place, tl.load(x + place) + tl.load(x + 4))
