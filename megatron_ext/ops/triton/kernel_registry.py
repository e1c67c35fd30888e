"""Registry of all kernels and their variants: only compiled and tested variants are launched.

A kernel is registered with the types that its arguments may have and with a bounded list of configurations. The
configuration of a call depends on the model's shapes alone (heads, channels, state size), never on the number of tokens
or requests or on cached data, so a token's result does not depend on them. There is no tuning at run time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError

Argument = Tensor | int | float
Types = Mapping[str, str]
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.bool: "i1",
}
"""Triton's names of torch's types."""
FLOATS = ("fp32", "bf16", "fp16")
STATE_TYPES: tuple[Types, ...] = tuple(
    {"T": inputs, "S": states}
    for inputs in FLOATS
    for states in (FLOATS if inputs == FLOATS[0] else (FLOATS[0], inputs))
)
"""Types of inputs T and states S: states are fp32 or of the inputs' type, or of any type if the inputs are fp32."""
MAX_REGISTERS = 255
"""Maximum number of registers of a thread."""
WHEREVER = ("i64", "i1")
"""Types of tensors that say where things lie and how many there are. They are views of one buffer, whose parts begin
now at a multiple of 16 bytes and now at 8: a kernel that was compiled for either would be compiled while it serves."""
MODULES = "*/kernels*.py"
"""Pattern of the files with kernels, below `ops/`."""


@dataclass(frozen=True)
class Config:
    """Compile-time configuration of a kernel.

    Attributes:
        constants: Values of the `tl.constexpr` parameters.
        num_warps: Warps of 32 threads each.
        num_stages: Stages of software pipelining.
        registers: Maximum registers of a thread. Without a limit ptxas sometimes spills to gain occupancy; with a limit
            it sometimes needs more registers than without.
        only: Types of inputs, letter T, that it supports, if not all: 32-bit types need other tiles than 16-bit ones.
        aligned: True if it is used only with tensors that begin at, and strides that are, multiples of 16; no other
            variant is compiled.
        archs: Compute capabilities, times ten, that it is compiled for; empty for all.
    """

    constants: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 2
    only: tuple[str, ...] = ()
    registers: int | None = None
    aligned: bool = False
    archs: tuple[int, ...] = ()

    @property
    def options(self) -> dict[str, int]:
        """Compiler options other than the constants."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}

    def __getitem__(self, constant: str) -> int:
        """Return the value of a constant."""
        return dict(self.constants)[constant]

    def suits(self, types: Types) -> bool:
        """Return whether the configuration supports inputs of these types."""
        return not self.only or types["T"] in self.only

    @property
    def name(self) -> str:
        """Name in tables, such as "N 128, P 32, 4 warps"."""
        return ", ".join([*(f"{name} {value}" for name, value in self.constants), f"{self.num_warps} warps"])


def config(**given: object) -> Config:
    """Build a configuration: options by the names of `Config`'s attributes, constants by their names in the kernel."""
    options: dict[str, Any] = {name: given.pop(name) for name in Config.__dataclass_fields__ if name in given}
    return Config(cast("tuple[tuple[str, int], ...]", tuple(given.items())), **options)


class Function(Protocol):
    """Result of `triton.jit`."""

    @property
    def arg_names(self) -> Sequence[str]:
        """Names of all parameters, in order."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return a callable that runs the kernel over a grid."""


class Launch(NamedTuple):
    """Launch recorded by `watch`. Triton compiles a kernel once for each value of this tuple."""

    kernel: str
    config: Config
    types: tuple[tuple[str, str], ...]
    specialization: frozenset[str]


@dataclass(frozen=True)
class Kernel:
    """Registered kernel.

    Attributes:
        name: Unique among all kernels.
        function: Result of `triton.jit`.
        pointers: Tensor parameters: name -> type, or a letter that stands for one.
        strides: Integer parameters specialized on divisibility by 16: strides and sizes of the model.
        counts: Integer parameters that are not specialized: numbers of tokens, rows and slots, and flags.
        scalars: Parameters of type fp32.
        types: Combinations of types that the letters may stand for.
        configs: All configurations that it is compiled with.
        views: Tensor parameters that are treated like parameters of the types `WHEREVER`.
    """

    name: str
    function: Function
    pointers: Mapping[str, str]
    strides: tuple[str, ...]
    counts: tuple[str, ...]
    scalars: tuple[str, ...]
    types: tuple[Types, ...]
    configs: tuple[Config, ...]
    views: tuple[str, ...] = ()

    @property
    def aligned(self) -> tuple[str, ...]:
        """Parameters specialized on alignment: they begin at, or are, multiples of 16."""
        found = [name for name, type_name in self.pointers.items() if type_name not in WHEREVER]
        return (*(name for name in found if name not in self.views), *self.strides)

    def require(self, **letters: torch.dtype) -> None:
        """Raise `NoKernelError` unless a variant supports tensors of these types, by letter."""
        wanted = {letter: TYPE_NAMES.get(dtype, str(dtype)) for letter, dtype in letters.items()}
        if not any(all(types[letter] == name for letter, name in wanted.items()) for types in self.types):
            listed = ", ".join(f"{name} as {letter}" for letter, name in wanted.items())
            raise NoKernelError(f"{self.name} has no kernel for {listed}")

    def variants(self) -> Iterator[tuple[Config, Types]]:
        """Yield every configuration with the types that it is compiled for."""
        yield from ((config, types) for config in self.configs for types in self.types if config.suits(types))

    def fitting(self, dtype: torch.dtype, arch: int | None = None, **sizes: int) -> Config | None:
        """Return the first configuration for this input type with constants of at least `sizes`; None without one.

        A device of an architecture that no configuration names takes the configurations of the oldest one.
        """
        named = {other for one in self.configs for other in one.archs}
        wanted = arch if arch in named else min(named, default=None)
        for one in self.configs:
            if one.archs and wanted not in one.archs:
                continue
            if one.suits({"T": TYPE_NAMES[dtype]}) and all(one[name] >= size for name, size in sizes.items()):
                return one
        return None

    def config_for(self, dtype: torch.dtype, arch: int | None = None, **sizes: int) -> Config:
        """Return the configuration of `fitting` for inputs that have one."""
        found = self.fitting(dtype, arch, **sizes)
        assert found is not None, f"{self.name} has no configuration for {sizes}"
        return found

    def specialization(self, arguments: Mapping[str, Argument]) -> frozenset[str]:
        """Return what Triton compiles a variant for, besides constants and types, as `name: fact`.

        These are tensors that begin at multiples of 16 bytes, strides that are multiples of 16 or 1, and integers of 64
        bits; see `WHEREVER` for tensors that it is not to look at.
        """
        found = set()
        for name in self.aligned:
            given = arguments[name]
            number = given.data_ptr() if isinstance(given, Tensor) else given
            found |= {f"{name}: 16"} if number % 16 == 0 else {f"{name}: 1"} if number == 1 else set()
        numbers = ((name, arguments[name]) for name in (*self.strides, *self.counts))
        return frozenset(found | {f"{name}: i64" for name, number in numbers if not -(2**31) <= number < 2**31})

    def launch(self, grid: tuple[int, ...], config: Config, **arguments: Argument) -> None:
        """Run over a grid; an empty grid does nothing."""
        assert config in self.configs, f"{config.name} is not a registered configuration of {self.name}"
        if 0 in grid:
            return
        for observe in _observers:
            observe(self, config, arguments)
        with _on_device_of(arguments.values()):
            self.function[grid](**arguments, **dict(config.constants), **config.options)

    def launch_with(self, grid: tuple[int, ...], config: Config, given: Mapping[str, Argument]) -> None:
        """Run with the `given` arguments that the kernel has; others are ignored."""
        taken = (*self.pointers, *self.strides, *self.counts, *self.scalars)
        self.launch(grid, config, **{name: given[name] for name in taken})

    def described(self, config: Config, arguments: Mapping[str, Argument]) -> Launch:
        """Return the launch of these arguments, which must match a compiled variant."""
        letters: dict[str, str] = {}
        for name, type_name in self.pointers.items():
            given = arguments[name]
            assert isinstance(given, Tensor), f"{name} of {self.name} is not a tensor"
            found = TYPE_NAMES[given.dtype]
            if type_name in TYPE_NAMES.values():
                assert found == type_name, f"{name} of {self.name} is of {found}, compiled for {type_name}"
            else:
                assert letters.setdefault(type_name, found) == found, f"{name} of {self.name} is of {found}"
        variants = [dict(types) for one, types in self.variants() if one == config]
        assert letters in variants, f"{self.name} ({config.name}) is not compiled for {letters}"
        return Launch(self.name, config, tuple(sorted(letters.items())), self.specialization(arguments))


def _on_device_of(arguments: Iterable[Argument]) -> AbstractContextManager[object]:
    """Return a context with the current device of the tensors: Triton launches on the current one."""
    index = next(one.device.index for one in arguments if isinstance(one, Tensor))
    return nullcontext() if index in (None, torch.cuda.current_device()) else torch.cuda.device(index)


_KERNELS: dict[str, Kernel] = {}
Observer: TypeAlias = Callable[[Kernel, Config, Mapping[str, Argument]], None]
_observers: list[Observer] = []


def kernel(
    *,
    pointers: Mapping[str, str],
    views: str = "",
    counts: str = "",
    scalars: str = "",
    types: Sequence[Types] = ({},),
    configs: Sequence[Config],
) -> Callable[[Callable[..., None]], Kernel]:
    """Register a kernel; replaces `triton.jit`, which remains for the functions that kernels call.

    Its parameters that are neither named here nor constants of `configs` are strides and sizes of the model.

    Args:
        pointers: Space-separated names of tensors by their type, or by a letter.
        views: Space-separated names of parameters; see `Kernel`.
        counts: Space-separated names of parameters; see `Kernel`.
        scalars: Space-separated names of parameters; see `Kernel`.
        types: See `Kernel`.
        configs: See `Kernel`.
    """
    import triton

    def register(function: Callable[..., None]) -> Kernel:
        name = function.__name__
        assert name not in _KERNELS, f"two kernels are called {name}"
        wherever = [one for type_name in WHEREVER for one in pointers.get(type_name, "").split()] + views.split()
        typed = {parameter: type_name for type_name, names in pointers.items() for parameter in names.split()}
        constants = {constant for one in configs for constant, _ in one.constants}
        named = {*typed, *views.split(), *counts.split(), *scalars.split(), *constants}
        compiled = triton.jit(function, do_not_specialize=counts.split(), do_not_specialize_on_alignment=wherever)
        assert named <= set(compiled.arg_names), f"{name}: {named - set(compiled.arg_names)}"
        made = Kernel(
            name,
            compiled,
            typed,
            tuple(parameter for parameter in compiled.arg_names if parameter not in named),
            tuple(counts.split()),
            tuple(scalars.split()),
            tuple(types),
            tuple(configs),
            tuple(views.split()),
        )
        _KERNELS[name] = made
        return made

    return register


def kernel_modules() -> list[str]:
    """Return the names of the modules that have kernels."""
    folder = Path(__file__).parents[1]
    return sorted(f"megatron_ext.ops.{path.parent.name}.{path.stem}" for path in folder.glob(MODULES))


def all_kernels() -> list[Kernel]:
    """Import all kernel modules and return their kernels. Needs triton."""
    for module in kernel_modules():
        importlib.import_module(module)
    return list(_KERNELS.values())


@contextmanager
def watch() -> Iterator[list[Launch]]:
    """Record launches within the context, in order, and check their types against the declared ones. For tests."""
    launches: list[Launch] = []
    with observing(lambda kernel, config, arguments: launches.append(kernel.described(config, arguments))):
        yield launches


@contextmanager
def observing(observe: Observer) -> Iterator[None]:
    """Call `observe` with the kernel, the configuration and the arguments of each launch within the context, first."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)
