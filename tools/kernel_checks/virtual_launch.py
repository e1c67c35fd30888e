"""Kernel launches of full size, recorded and interpreted in part, without memory of that size and without a GPU.

Large tensors are on the `meta` device and get addresses in a range that no process uses; tensors of numbers that
kernels decide by (lengths, tables, slots) are real. A launch is recorded, then some of its programs run in Triton's
interpreter: loads from `meta` tensors yield zeros, stores to them are only counted, and an address outside of the
tensor is an error, as one of a product that overflowed would be. Loops over a `range` run their first and last trip
only, `while` loops all; all trips are counted.
"""

from __future__ import annotations

import math
import operator
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.ops.triton.kernel_registry import TYPE_NAMES, Config, Kernel

FIRST_ADDRESS, SPACING = 1 << 60, 1 << 50
"""Addresses of `meta` tensors: above all that a process has, far enough apart that a wrong offset hits no other one."""
MODULES = "megatron_ext.ops."


class AddressError(Exception):
    """A program addresses memory outside of the tensor that its pointer belongs to."""


@dataclass(frozen=True)
class Recorded:
    """Launch of a kernel with its arguments."""

    kernel: Kernel
    grid: tuple[int, ...]
    config: Config
    arguments: Mapping[str, Tensor | int | float]

    @property
    def programs(self) -> int:
        """Size of the grid."""
        return math.prod(self.grid)

    @property
    def wide(self) -> list[str]:
        """Integer arguments beyond 32 bits: they select a variant that is not compiled ahead of time."""
        return [name for name, one in self.arguments.items() if isinstance(one, int) and not -(2**31) <= one < 2**31]

    @property
    def misaligned(self) -> list[str]:
        """Arguments that are not multiples of 16 although the configuration is compiled for such only."""
        values = {name: self.arguments[name] for name in (self.kernel.aligned if self.config.aligned else ())}
        return [name for name, one in values.items() if _place(one) % 16]


def _place(one: Tensor | int | float) -> int:
    """Return the address of a tensor in its storage, or a number itself."""
    return one.storage_offset() * one.element_size() if isinstance(one, Tensor) else int(one)


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Record launches within the context instead of running them."""
    launches: list[Recorded] = []

    def launch(kernel: Kernel, grid: tuple[int, ...], config: Config, **arguments: Tensor | int | float) -> None:
        kernel.described(config, arguments)
        if 0 not in grid:
            launches.append(Recorded(kernel, grid, config, arguments))

    plain, Kernel.launch = Kernel.launch, launch  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        Kernel.launch = plain  # type: ignore[method-assign]


class MadeBytes(TorchDispatchMode):
    """Bytes of the tensors that are made within the mode.

    Attributes:
        total: Bytes.
    """

    _is_paused: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    @contextmanager
    def uncounted(cls) -> Iterator[None]:
        """Do not count the tensors that are made within the context."""
        before, cls._is_paused = cls._is_paused, True
        try:
            yield
        finally:
            cls._is_paused = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not self._is_paused:
            given = {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
            made = {_key(one): one for one in tree_leaves(found) if isinstance(one, Tensor)}
            self.total += sum(one.untyped_storage().nbytes() for key, one in made.items() if key not in given)
        return found


def _key(t: Tensor) -> int:
    return t.untyped_storage()._cdata


@dataclass(frozen=True)
class Program:
    """Result of one program.

    Attributes:
        stores: Stores of at least one element.
        trips: Trips of its longest loop; an inner loop's trips count for each trip of the outer one.
    """

    stores: int
    trips: int


@dataclass
class _Memory:
    """Stand-in for the interpreter's loads and stores."""

    plain: object
    extents: list[tuple[int, int]]  # first address and end, by tensor
    stores: int = 0

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        if not self._is_virtual(pointers, mask):
            return self.plain.load(pointers, mask, other, dtype)  # type: ignore[attr-defined, no-any-return]
        return np.where(mask, np.zeros_like(other), other)

    def store(self, pointers: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        self.stores += bool(mask.any())
        if not self._is_virtual(pointers, mask):
            self.plain.store(pointers, values, mask)  # type: ignore[attr-defined]

    def _is_virtual(self, pointers: np.ndarray, mask: np.ndarray) -> bool:
        used = pointers[np.broadcast_to(mask, pointers.shape)] if mask.any() else pointers[:0].reshape(-1)
        if not used.size:
            return True
        first, last = int(used.min()), int(used.max())
        begin, end = min(self.extents, key=lambda one: abs(first - one[0]) if first >= one[0] else 1 << 64)
        if not (begin <= first and last < end):
            raise AddressError(f"bytes {first - begin:,} to {last - begin:,} of a tensor of {end - begin:,}")
        return begin >= FIRST_ADDRESS

    def __getattr__(self, name: str) -> object:
        return getattr(self.plain, name)


@dataclass
class _Loops:
    """Stand-in for `range` in kernels: the first and the last trip; and a count of all trips of loops."""

    longest: int = 0
    _outer: list[tuple[int, dict]] = field(default_factory=lambda: [(1, {})])  # trips, and passes by place in the code

    def range(self, *bounds: object) -> Iterator[int]:
        trips = range(*(operator.index(one) for one in bounds))  # type: ignore[call-overload]
        self.note(sys._getframe(1), len(trips))
        for trip in (*trips[:1], *trips[max(1, len(trips) - 1) :]):
            self._outer.append((self._outer[-1][0] * len(trips), {}))
            yield trip
            self._outer.pop()

    def note(self, frame: FrameType, trips: int) -> None:
        """Add trips of the loop at this place of a function; a `while` loop computes its condition once a trip."""
        times, passes = self._outer[-1]
        place = frame, frame.f_lasti
        passes[place] = passes.get(place, 0) + trips
        self.longest = max(self.longest, times * passes[place])


def run_programs(launch: Recorded, programs: Sequence[int]) -> list[Program]:
    """Interpret the programs with these numbers, counted along the grid's first axis first.

    Raises:
        AddressError: A load or a store is outside of its tensor.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    addresses, extents = _addresses(launch)
    types = {name: _type(launch, name) for name in launch.kernel.pointers}
    arguments: dict[str, object] = dict(launch.config.constants)
    for name, one in launch.arguments.items():
        if name in types:
            dtype = tl.str_to_ty(f"*{types[name]}", None)
            handle = interpreter.TensorHandle(np.array([addresses[name]], dtype=np.uint64), dtype)
            arguments[name] = tl.tensor(handle, dtype)
        else:
            arguments[name] = interpreter._implicit_cvt(one)
    function = launch.kernel.function.rewrite()  # type: ignore[attr-defined]
    memory, builder = _Memory(interpreter._interpreter, extents), interpreter.interpreter_builder
    grid = (*launch.grid, 1, 1)[:3]
    found = []
    scope = interpreter._patch_lang(function)
    try:
        builder.set_grid_dim(*grid)
        interpreter._interpreter = memory
        for number in programs:
            memory.stores, loops = 0, _Loops()
            builder.set_grid_idx(number % grid[0], number // grid[0] % grid[1], number // grid[0] // grid[1])
            with _counting(loops, function.__globals__), np.errstate(all="ignore"):
                _call(function, arguments, launch.kernel.name)
            found.append(Program(memory.stores, loops.longest))
    finally:
        interpreter._interpreter = memory.plain
        scope.restore()
    return found


def _call(function, arguments: Mapping[str, object], name: str) -> None:
    try:
        function(**arguments)
    except Exception as error:
        if "AddressError" in repr(error):
            raise AddressError(f"{name}: {error}") from error
        raise


def _addresses(launch: Recorded) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Return the address of each tensor, and the extent of each storage."""
    bases: dict[int, int] = {}
    extents, addresses = [], {}
    for name in launch.kernel.pointers:
        one = launch.arguments[name]
        assert isinstance(one, Tensor)
        storage = one.untyped_storage()
        is_new = storage._cdata not in bases
        base = FIRST_ADDRESS + len(bases) * SPACING if one.is_meta else storage.data_ptr()
        base = bases.setdefault(storage._cdata, base)
        if is_new:
            extents.append((base, base + storage.nbytes()))
        addresses[name] = base + one.storage_offset() * one.element_size()
    return addresses, extents


def _type(launch: Recorded, name: str) -> str:
    one = launch.arguments[name]
    assert isinstance(one, Tensor)
    return TYPE_NAMES[one.dtype]


@contextmanager
def _counting(loops: _Loops, names: dict[str, object]) -> Iterator[None]:
    """Replace conditions, and `range` where a kernel finds it and in the modules of the functions that kernels call."""
    import triton.language as tl

    modules = [vars(one) for name, one in sys.modules.items() if name.startswith(MODULES) and "triton" in vars(one)]
    for one in (names, *modules):
        one["range"] = loops.range
    plain = tl.tensor.__bool__

    def condition(value: tl.tensor) -> bool:
        loops.note(sys._getframe(1), 1)
        return plain(value)

    tl.tensor.__bool__ = condition
    try:
        yield
    finally:
        tl.tensor.__bool__ = plain
        for one in (names, *modules):
            one.pop("range", None)


@dataclass(frozen=True)
class Figures:
    """Figures of a launch.

    Attributes:
        programs: Size of the grid.
        useful: Share of programs that store something, of a sample.
        trips: Trips of the longest loop of a program, of the sample and of the grid's corners.
    """

    programs: int
    useful: float
    trips: int


def measure(launch: Recorded, sample: int = 16) -> Figures:
    """Interpret a sample of a launch's programs, always the same, and those at the corners of its grid."""
    x, y, z = (*launch.grid, 1, 1)[:3]
    chosen = random.Random(launch.programs).sample(range(launch.programs), min(sample, launch.programs))
    corners = {i + x * (j + y * k) for i in (0, x - 1) for j in (0, y - 1) for k in (0, z - 1)}
    drawn = run_programs(launch, chosen)
    others = run_programs(launch, sorted(corners - set(chosen)))
    useful = sum(one.stores > 0 for one in drawn) / len(drawn)
    return Figures(launch.programs, useful, max(one.trips for one in (*drawn, *others)))
