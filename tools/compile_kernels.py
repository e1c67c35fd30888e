#!/usr/bin/env python
"""Compile every Triton kernel for sm_80 and sm_90, on any machine: registers, spills and shared memory, as a table.

Run: `python tools/compile_kernels.py`, or with `--quick` one configuration of each. Exit code 1 if a kernel cannot be
compiled, spills although `KNOWN_SPILLS` does not say so, or needs more shared memory than its device has; 2 if nothing
can be compiled here. With `--device` only the kernels of the CUDA device are compiled, if it is one of these; later
launches find them in Triton's cache (`TRITON_CACHE_DIR`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from tqdm import tqdm

from megatron_ext.ops import triton
from megatron_ext.ops.triton.kernel_registry import all_kernels

if TYPE_CHECKING:  # needs triton
    from megatron_ext.ops.triton.aot import Case

DONE, PROBLEMS, CANNOT = 0, 1, 2
KNOWN_SPILLS: dict[str, frozenset[tuple[str, str, int]]] = {
    "3.6.0": frozenset(
        {
            ("paged_prefill", "M 64, N 32, DP 128, FULL_FP32 0, SPAN 4096, 8 warps", 80),  # 4 bytes
            ("chunk_scan", "TILE 64, P 64, N 128, 4 warps", 90),  # 20 bytes
            ("delta_prefill", "TILE 32, K 64, V 16, 4 warps", 90),  # 8 bytes, with nothing aligned
        }
    )
}
"""Kernels, configurations and devices that spill, by version of Triton. The version of constraints.txt has none."""


class Row(NamedTuple):
    """Resources of a configuration on a device: registers and spilled bytes of a thread, shared bytes of a block."""

    kernel: str
    config: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int


def as_text(rows: Iterable[Row]) -> str:
    """Format a line for each configuration and device; numbers are maxima over its compiled types."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault(row[:3], []).append(row)
    lines = [("kernel", "configuration", "device", "types", "registers", "spills", "shared memory")]
    for (kernel, config, arch), same in found.items():
        registers, spills, shared = (max(column) for column in list(zip(*same, strict=True))[3:])
        lines.append((kernel, config, f"sm_{arch}", f"{len(same)}", f"{registers}", f"{spills}", f"{shared:,}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligns = [str.ljust] * 3 + [str.rjust] * 4
    return "\n".join("  ".join(map(lambda align, *cell: align(*cell), aligns, line, widths)).rstrip() for line in lines)


def chosen(quick: bool, arch: int | None) -> list[Case]:
    """Return the cases; those of one device if `arch` names it."""
    from megatron_ext.ops.triton import aot

    return [case for case in aot.cases(all_kernels(), quick=quick) if arch in (None, case.arch)]


def compile_one(index: int, quick: bool, arch: int | None) -> tuple[Row | None, str | None]:
    """Return the table row of a case by its index in `chosen`, or None; and its error, or None."""
    from megatron_ext.ops.triton import aot

    case = chosen(quick, arch)[index]
    try:
        made = aot.compile_case(case)
    except aot.CompileFailure as error:
        return None, str(error)
    known = KNOWN_SPILLS.get(importlib.metadata.version("triton"), frozenset())
    judged = replace(made, spilled_bytes=0) if (case.kernel.name, case.config.name, case.arch) in known else made
    problem = None if judged.problem is None else f"{case.name} on sm_{case.arch} {judged.problem}"
    numbers = made.registers, made.spilled_bytes, made.shared_bytes
    return Row(case.kernel.name, case.config.name, case.arch, *numbers), problem


def compile_all(count: int, quick: bool, arch: int | None) -> Iterator[tuple[Row | None, str | None]]:
    """Yield `compile_one` of all cases: a short selection in this process, many on every core."""
    if quick:
        yield from (compile_one(index, quick, arch) for index in range(count))
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compile_one, range(count), [quick] * count, [arch] * count)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile all kernels, print the table, and then the errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one configuration of each kernel, for the newest device")
    parser.add_argument("--device", action="store_true", help="compile for the CUDA device of this machine alone")
    options = parser.parse_args(argv)
    quick = options.quick
    if not triton.can_be_imported() or triton.is_interpreted():
        why = f"unset {triton.INTERPRET}" if triton.can_be_imported() else "triton cannot be imported; install it"
        print(f"compile_kernels.py: error: {why}", file=sys.stderr)
        return CANNOT
    if options.device and not torch.cuda.is_available():
        print("compile_kernels.py: error: --device needs a CUDA device; torch sees none", file=sys.stderr)
        return CANNOT
    arch = triton.architecture(torch.device("cuda")) if options.device else None
    if arch is not None and not chosen(False, arch):
        print(f"sm_{arch} is neither sm_80 nor sm_90: nothing is compiled ahead, but each kernel at its first launch")
        return DONE
    start, count = time.monotonic(), len(chosen(quick, arch))
    found = list(tqdm(compile_all(count, quick, arch), total=count, unit="kernel", disable=None))
    print(as_text(row for row, _ in found if row is not None))
    problems = [problem for _, problem in found if problem is not None]
    print(f"\n{count} compiled in {time.monotonic() - start:.0f} s, {len(problems)} with problems")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return PROBLEMS if problems else DONE


if __name__ == "__main__":
    sys.exit(main())
