"""Recorder that shows, without a GPU, whether two steps are one program on different values, as CUDA graphs need.

A graph replays kernels with the very arguments of the step that was captured: shapes, strides, numbers from the host,
addresses. So the recorder writes down these of every operation, and two records must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# What makes the host wait for the device, or the size of its answer depend on what is on the device.
READS_BACK = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",
}
# What brings something from the host into the program.
FROM_HOST = {"aten::lift_fresh", "aten::lift_fresh_copy", "aten::_pin_memory"}


@dataclass(frozen=True)
class Operand:
    """Tensor operand of an operation: its layout and its address.

    `place` is the address of memory from outside of the program, or the number of what the program has made itself.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    place: tuple[str, int]


def leaves(value: object) -> Iterator[object]:
    """Yield what an operation is given or gives, without tuples, lists and dictionaries; faster than pytrees."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


class ProgramRecorder(TorchDispatchMode):
    """Notes the operations that run within it.

    Attributes:
        operations: Name and arguments of each.
        unfit: Operations that no graph can have.
        outside: Weak references to the storages that the operations use and that none of them made, by address. A graph
            keeps their addresses, so they must outlive it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, tuple[object, ...]]] = []
        self.unfit: list[str] = []
        self.outside: dict[int, StorageWeakRef] = {}
        self._made: dict[int, int] = {}  # address of storage -> its number
        self._kept: list[Tensor] = []  # so that no address comes twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(leaves((args, kwargs)))
        name = str(func._schema.name) + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        self.operations.append((name, tuple(self._describe(one) for one in given)))
        if name in READS_BACK or name in FROM_HOST or _is_boolean_index(name, given):
            self.unfit.append(name)
        self._note_outside(given)
        found = func(*args, **kwargs)
        before = {one.untyped_storage().data_ptr() for one in given if isinstance(one, Tensor)}
        for one in leaves(found):
            if isinstance(one, Tensor):
                address = one.untyped_storage().data_ptr()
                if address not in before and address not in self._made:
                    self._made[address] = len(self._made)
                self._kept.append(one)
        self._kept += [one for one in given if isinstance(one, Tensor)]
        return found

    def _note_outside(self, given: list[object]) -> None:
        for one in given:
            if isinstance(one, Tensor) and (address := one.untyped_storage().data_ptr()) not in self._made:
                self.outside.setdefault(address, StorageWeakRef(one.untyped_storage()))

    def forget_operands(self) -> None:
        """Drop the tensors, which were kept so that each address belongs to one of them."""
        self._kept.clear()

    def _describe(self, given: object) -> object:
        if not isinstance(given, Tensor):
            return given if isinstance(given, (int, float, bool, str, type(None))) else str(given)
        address = given.untyped_storage().data_ptr()
        place = ("made", self._made[address]) if address in self._made else ("outside", given.data_ptr())
        return Operand(tuple(given.shape), given.stride(), given.dtype, place)


def _is_boolean_index(name: str, given: list[object]) -> bool:
    """Return whether the operation indexes by a boolean mask, so that the number of true entries sets its length."""
    is_index = name.split(".")[0] in ("aten::index", "aten::index_put_")
    return is_index and any(isinstance(one, Tensor) and one.dtype == torch.bool for one in given[1:-1] or given[1:])


def differences(first: ProgramRecorder, second: ProgramRecorder) -> Counter[str]:
    """Differences of two programs, as text with counts, up to the first operation that differs."""
    found: Counter[str] = Counter()
    if len(first.operations) != len(second.operations):
        found[f"{len(first.operations)} operations, then {len(second.operations)}"] += 1
    for (name, own), (other_name, others) in zip(first.operations, second.operations, strict=False):
        if name != other_name or len(own) != len(others):
            found[f"{name}, then {other_name}"] += 1
            break
        for one, other in zip(own, others, strict=True):
            if one != other:
                found[f"{name}: {_difference(one, other)}"] += 1
    return found


def _difference(one: object, other: object) -> str:
    if isinstance(one, Operand) and isinstance(other, Operand):
        if one.shape != other.shape:
            return "shape"
        return "address" if one.place != other.place else "stride or type"
    return "a number from the host"
