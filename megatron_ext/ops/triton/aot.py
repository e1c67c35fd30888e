"""Ahead-of-time compilation of every kernel, without a GPU: registers, spills, shared memory, products.

Triton compiles down to PTX; the `ptxas` in its wheel assembles that to machine code and reports the resources.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from megatron_ext.ops.triton.ir_lint import Loop, loops, precisions, uses_warp_groups
from megatron_ext.ops.triton.kernel_registry import FLOATS, Config, Kernel, Types

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Maximum shared memory of a thread block in bytes, by compute capability times ten (CUDA programming guide, technical
specifications: 164 and 228 KB a multiprocessor, of which the system reserves 1 KB a block)."""
DIVISIBLE: list[list[str | int]] = [["tt.divisibility", 16]]
NOTES_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""True if a launch notes of each constant that it is not divisible."""
ALIGNED = "aligned"
LAYOUTS = (ALIGNED, "odd", "odd strides", "odd tensors", "strides of 64 bits")
"""Tensors begin at, and strides are, multiples of 16: all of them, none, only the tensors, only the strides; and all of
them with strides beyond 32 bits."""
WITHOUT_OVERLAP = frozenset({"chunk_scan", "state_passing"})
"""Kernels with loops that wait for copies right after their issue: a third stage would spill `state_passing` on sm_80,
and take `chunk_scan` with 128 states from three blocks a multiprocessor to two."""
WITHOUT_WARP_GROUPS = frozenset({"delta_prefill", "delta_tiles", "paged_decode_split"})
"""Kernels some of whose tiles are too small for products of warp groups on sm_90."""


@dataclass(frozen=True)
class Case:
    """Kernel variant to compile.

    Attributes:
        kernel: Kernel to compile.
        config: Configuration of the kernel.
        types: Types of the letters of its tensors.
        layout: One of `LAYOUTS`.
        arch: Compute capability of the device, times ten.
    """

    kernel: Kernel
    config: Config
    types: Types
    layout: str
    arch: int

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        letters = ["/".join(self.types.values())] if self.types else []
        layouts = [] if self.layout == ALIGNED else [self.layout]
        return f"{self.kernel.name} ({', '.join([self.config.name, *letters, *layouts])})"


@dataclass(frozen=True)
class Compiled:
    """Resources of a compiled case, and how it computes products.

    Attributes:
        case: Compiled case.
        registers: Registers of a thread.
        spilled_bytes: Spilled bytes of a thread.
        shared_bytes: Shared memory of a block of threads.
        precisions: See `ir_lint.precisions`.
        loops: Loops with products.
        uses_warp_groups: See `ir_lint.uses_warp_groups`.
    """

    case: Case
    registers: int
    spilled_bytes: int
    shared_bytes: int
    precisions: frozenset[str] = frozenset()
    loops: tuple[Loop, ...] = ()
    uses_warp_groups: bool = True

    @property
    def overlaps(self) -> bool:
        """True if copies overlap products in all loops that have both."""
        return all(loop.overlaps for loop in self.loops if loop.copies)

    @property
    def problem(self) -> str | None:
        """Description of a problem; None without a problem."""
        if "tf32" in self.precisions and self.case.types.get("T") == FLOATS[0]:
            return "rounds fp32 inputs of a product to tf32"
        if not self.overlaps and self.case.kernel.name not in WITHOUT_OVERLAP:
            return "waits for copies that no product overlaps"
        if self.case.arch >= 90 and not self.uses_warp_groups and self.case.kernel.name not in WITHOUT_WARP_GROUPS:
            return "computes 16-bit products without warp groups"
        if self.spilled_bytes:
            return f"spills {self.spilled_bytes} bytes"
        limit = SHARED_BYTES[self.case.arch]
        if self.shared_bytes > limit:
            return f"needs {self.shared_bytes} bytes of shared memory; sm_{self.case.arch} has {limit}"
        return None


class CompileFailure(Exception):
    """Failure to compile a case, with the error message."""


def cases(kernels: Sequence[Kernel], *, quick: bool = False) -> Iterator[Case]:
    """Yield the cases to compile; `quick` is one configuration of each kernel, of one type, for the newest device.

    Other layouts are compiled with a configuration's first types only: they change how elements are loaded.
    """
    for kernel in kernels:
        variants, seen = list(kernel.variants()), set()
        if quick:
            yield Case(kernel, *variants[0], ALIGNED, max(variants[0][0].archs or SHARED_BYTES))
            continue
        for config, types in variants:
            layouts = (ALIGNED,) if config in seen else LAYOUTS[:: len(LAYOUTS) - 1] if config.aligned else LAYOUTS
            for layout in layouts if kernel.strides else layouts[:2]:
                yield from (Case(kernel, config, types, layout, arch) for arch in config.archs or SHARED_BYTES)
            seen.add(config)


def compile_case(case: Case) -> Compiled:
    """Compile a case for its device.

    Raises:
        CompileFailure: The case cannot be compiled.
    """
    source = triton.compiler.ASTSource(
        case.kernel.function, _signature(case), dict(case.config.constants), _attributes(case)
    )
    try:
        made = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=case.config.options)
    except Exception as error:  # any failure of Triton's passes; the caller reports it and fails
        raise CompileFailure(f"{case.name} for sm_{case.arch}: {type(error).__name__}: {error}") from error
    registers, spilled = _assemble(made.asm["ptx"], case)
    ttgir = made.asm["ttgir"]
    products = frozenset(precisions(made.asm["ttir"])), tuple(loops(ttgir)), uses_warp_groups(ttgir)
    return Compiled(case, registers, spilled, made.metadata.shared, *products)


def _signature(case: Case) -> dict[str, str]:
    """Return every parameter's type, in the order of the function."""
    kernel = case.kernel
    types = {name: case.types.get(type_name, type_name) for name, type_name in kernel.pointers.items()}
    types = {name: f"*{'u1' if type_name == 'i1' else type_name}" for name, type_name in types.items()}
    types |= dict.fromkeys(kernel.strides, "i64" if case.layout == LAYOUTS[-1] else "i32")
    types |= dict.fromkeys(kernel.counts, "i32") | dict.fromkeys(kernel.scalars, FLOATS[0])
    return {name: types.get(name, "constexpr") for name in kernel.function.arg_names}


def _attributes(case: Case) -> dict[tuple[int], list[list[str | int]]]:
    """Return the attributes that a launch notes of each parameter, so that it finds the case in Triton's cache."""
    kernel, constants = case.kernel, dict(case.config.constants)
    odd = {"odd": kernel.aligned, "odd strides": kernel.strides, "odd tensors": tuple(kernel.pointers)}
    divisible = set(kernel.aligned) - set(odd.get(case.layout, ()))
    noted = {*kernel.pointers, *kernel.strides, *(constants if NOTES_CONSTANTS else ())}
    return {
        (place,): DIVISIBLE if name in divisible else []
        for place, name in enumerate(kernel.function.arg_names)
        if name in noted
    }


def _assemble(ptx: str, case: Case) -> tuple[int, int]:
    """Assemble PTX; return the registers and the spilled bytes of a thread."""
    name = f"sm_{case.arch}a" if case.arch >= 90 else f"sm_{case.arch}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", str(path), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    if done.returncode or registers is None:
        raise CompileFailure(f"{case.name}: ptxas says {done.stderr[-500:]}")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    return int(registers[1]), max((int(number) for pair in spills for number in pair), default=0)
