"""Tensors by name from `model.safetensors`, whole or in shards, and the checks for filling a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.errors import CheckpointError
from megatron_ext.files import open_regular, read_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATING_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAMES_SHOWN = 4
_LONGEST_INDEX = 64 * 1024**2  # bytes; an index of 100,000 tensors has 10 MB
_MAX_PARTS = 2**20  # maximum slices of all split tensors


class WeightFiles:
    """Weights of one directory, on the host.

    Raises:
        CheckpointError: No weights, a missing or damaged shard, or an index that does not fit its shards.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        is_whole = os.path.lexists(directory / WEIGHTS_FILE)
        self._file_of = dict.fromkeys(self._keys(WEIGHTS_FILE), WEIGHTS_FILE) if is_whole else self._shards()
        self._open: dict[str, safe_open] = {}
        self._part_of: dict[str, tuple[str, str, int]] = {}  # a part's name -> file, tensor and index there
        self._joined: dict[str, list[str]] = {}  # name of a joined tensor -> names of its parts

    @property
    def names(self) -> set[str]:
        """Names of the tensors, of the slices of split ones, and of joined ones."""
        parts = {part for parts in self._joined.values() for part in parts}
        return (set(self._file_of) | set(self._part_of) | set(self._joined)) - parts

    def split(self, name: str, part_name: Callable[[int], str]) -> None:
        """Replace a tensor by its slices along the first dimension, under their own names.

        Raises:
            CheckpointError: A tensor with such a name exists.
        """
        file = self._file_of.pop(name)
        shape = self._handle(file).get_slice(name).get_shape()
        count = shape[0] if shape else 0
        if len(self._part_of) + count > _MAX_PARTS:
            raise CheckpointError(f"{self.directory}: tensor {name} of shape {shape} is not one of {count} parts")
        for index in range(count):
            part = part_name(index)
            if part in self._file_of or part in self._part_of:
                raise CheckpointError(f"{self.directory} has both {name} and {part}, which is a part of it")
            self._part_of[part] = (file, name, index)

    def join(self, name: str, parts: list[str]) -> None:
        """Replace several tensors by their concatenation by rows.

        Raises:
            CheckpointError: One of them is missing, their shapes do not fit, or a tensor with such a name exists.
        """
        missing = [part for part in parts if part not in self._file_of]
        if missing:
            raise CheckpointError(f"{self.directory} lacks {missing[0]}, which is a part of {name}")
        if any(name in known for known in (self._file_of, self._part_of, self._joined)):
            raise CheckpointError(f"{self.directory} has both {name} and {parts[0]}, which is a part of it")
        shapes = [self.shape(part) for part in parts]
        if not all(shapes) or len({shape[1:] for shape in shapes}) > 1:
            raise CheckpointError(f"{self.directory}: tensors of shapes {shapes} are not parts of one, {name}")
        self._joined[name] = parts

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""
        if name in self._joined:
            shapes = [self.shape(part) for part in self._joined[name]]
            return (sum(shape[0] for shape in shapes), *shapes[0][1:])
        file, whole, index = self._part_of.get(name) or (self._file_of[name], name, None)
        shape = self._handle(file).get_slice(whole).get_shape()
        return tuple(shape if index is None else shape[1:])

    def get(self, name: str, box: tuple[slice, ...] | None = None) -> Tensor:
        """Return one tensor, in its stored type; only floating point types are weights.

        Args:
            box: Part of the tensor to read; None for all.
        """
        if name in self._joined:
            return self.concatenated(self._joined[name], box or tuple(slice(0, size) for size in self.shape(name)))
        if name in self._part_of:
            file, whole, index = self._part_of[name]
            place = (index, *(box or ()))
            tensor = self._handle(file).get_slice(whole)[place]
        elif box is None or _covers(box, self.shape(name)):
            tensor = self._handle(self._file_of[name]).get_tensor(name)
        else:
            tensor = self._handle(self._file_of[name]).get_slice(name)[box]
        require_floating(tensor.dtype, f"{self.directory}: tensor {name}")
        return tensor

    def concatenated(self, parts: Sequence[str], box: tuple[slice, ...]) -> Tensor:
        """Return a box of tensors concatenated by rows; only its overlap with each part is read."""
        if not box:  # a tensor without dimensions
            return self.get(parts[0])
        found, first = [], 0
        for part in parts:
            rows = self.shape(part)[0]
            low, high = max(box[0].start, first), min(box[0].stop, first + rows)
            if low < high:
                found.append(self.get(part, (slice(low - first, high - first), *box[1:])))
            first += rows
        return found[0] if len(found) == 1 else torch.cat(found)

    def _shards(self) -> dict[str, str]:
        index = self.directory / INDEX_FILE
        if not os.path.lexists(index):
            raise CheckpointError(
                f"{self.directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; only safetensors weights are supported"
            )
        file_of = read_json(index, _LONGEST_INDEX).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise CheckpointError(f"{index} has no weight_map")
        listed: dict[str, set[str]] = {}
        for name, shard in file_of.items():
            if not isinstance(shard, str) or not is_file_name(shard):
                raise CheckpointError(
                    f"{self.directory}: {INDEX_FILE} names the shard {shard!r}, which is not a file name"
                )
            listed.setdefault(shard, set()).add(name)
        for shard, names in sorted(listed.items()):
            if not os.path.lexists(self.directory / shard):
                raise CheckpointError(f"{self.directory}: {INDEX_FILE} names the shard {shard}, which is missing")
            if names != set(self._keys(shard)):
                raise CheckpointError(f"{self.directory}: {INDEX_FILE} and {shard} do not list the same tensors")
        return file_of

    def _keys(self, file: str) -> list[str]:
        return list(_opened(self.directory / file).keys())

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            self._open[file] = _opened(self.directory / file)
        return self._open[file]


def _covers(box: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(one == slice(0, size) for one, size in zip(box, shape, strict=True))


def _opened(path: Path) -> safe_open:
    open_regular(path, CheckpointError).close()
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def is_file_name(name: str) -> bool:
    """Return whether a name from an untrusted file names a file in the same directory."""
    return name.isprintable() and name == Path(name).name and name not in ("", "..")


def require_floating(dtype: torch.dtype, tensor: str, error: type[ValueError] = CheckpointError) -> None:
    """Require a type that weights can have; the message begins with `tensor`."""
    if dtype not in FLOATING_TYPES:
        found, *supported = (str(one).removeprefix("torch.") for one in (dtype, *FLOATING_TYPES))
        raise error(f"{tensor} is of type {found}; supported are {', '.join(supported)}")


def is_prediction(name: str) -> bool:
    """Return whether a tensor is of multi-token prediction, in any format."""
    return name.startswith("mtp.")


def require_same_names(directory: Path, stored: Iterable[str], expected: Iterable[str]) -> None:
    """Require that the stored tensors and the model's tensors have the same names."""
    missing, unexpected = sorted(set(expected) - set(stored)), sorted(set(stored) - set(expected))
    parts = [
        f"{label} {shortened(names)}" for label, names in (("lacks", missing), ("has unexpected", unexpected)) if names
    ]
    if parts:
        raise CheckpointError(f"{directory} does not fit the model: it {' and '.join(parts)}")


def require_shape(directory: Path, name: str, stored: Iterable[int], expected: Iterable[int]) -> None:
    """Require that a stored tensor has the shape of the model's configuration."""
    if tuple(stored) != tuple(expected):
        raise CheckpointError(
            f"{directory} does not fit the model: tensor {name} has shape {tuple(stored)}, and the configuration "
            f"requires {tuple(expected)}"
        )


def shortened(names: list[str]) -> str:
    """Return the first few names, and the number of the others."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
