"""`.metadata` of a distributed checkpoint: its tensors, their parts, and the location of each part.

torch writes this file as a pickle of its own classes and reads it back as a program. Here it is read as data
(plain_pickle.py), and only the fields below, of exactly these types, are used; other fields that a planner or trainer
wrote stay unread. Of objects such as `_extra_state` only the keys and the locations are known.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from megatron_ext.errors import CheckpointError
from megatron_ext.files import read_bytes
from megatron_ext.mcore.checkpoint import plain_pickle
from megatron_ext.mcore.checkpoint.plain_pickle import Global, PlainPickleError, RecordedCall

METADATA_FILE = ".metadata"
_LONGEST_FILE = 512 * 1024**2  # bytes; 10,000 tensors in 100,000 parts are 30 MB
_LARGEST = 2**62  # elements, or bytes
_MAX_DIMENSIONS = 8
_MAX_SHOWN = 100  # characters of a name

_DCP = "torch.distributed.checkpoint"
_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch"
# Pickled name of a dtype -> dtype.
_TYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_ROOTS = (f"{_DCP}.metadata.Metadata", f"{_STRATEGY}.MCoreMetadata")
_READ = (
    *_ROOTS,
    *_TYPES,
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    f"{_DCP}.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
)
# Names in fields that stay unread.
_PASSED_OVER = (
    *(f"{_DCP}.planner.{name}" for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem")),
    f"{_DCP}.planner.WriteItemType",
    f"{_DCP}.metadata.StorageMeta",
    f"{_DCP}.filesystem._StoragePrefix",
    f"{_STRATEGY}.MCoreSavePlan",
    "collections.OrderedDict",
    "torch.device",
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath")),
)
_ALLOWED = frozenset((*_READ, *_PASSED_OVER))
# Members of torch's enumerations, which Python 3.11.0 to 3.11.3 pickle by name.
_ENUMERATIONS = {
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": (
        "TORCH_CONTIGUOUS_FORMAT",
        "TORCH_CHANNELS_LAST",
        "TORCH_PRESERVE_FORMAT",
    ),
    f"{_DCP}.planner.WriteItemType": ("TENSOR", "SHARD", "BYTE_IO"),
}
_UNREAD_FIELDS = ("planner_data", "storage_meta", "version", "mcore_data", "all_local_plans")


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file that hold something."""

    file: str  # a name in the checkpoint's directory
    start: int
    length: int


@dataclass(frozen=True)
class StoredChunk:
    """Box of a tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: FileRange


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class StoredState:
    """Tensors and objects of a checkpoint, by key."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, FileRange | None]  # None if no file has it


def read_metadata(directory: Path) -> StoredState:
    """Read `.metadata`.

    Raises:
        CheckpointError: The file is missing, not a regular file, damaged, or not as torch and megatron-core write it.
    """
    path = directory / METADATA_FILE
    if not os.path.lexists(path):
        raise CheckpointError(f"{directory} has no {METADATA_FILE}")
    content = read_bytes(path, _LONGEST_FILE, CheckpointError)
    try:
        return _state(plain_pickle.load(content, _ALLOWED, enumerations=_ENUMERATIONS))
    except PlainPickleError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _state(root: Any) -> StoredState:
    _require(type(root) is RecordedCall and root.name in _ROOTS, "it does not describe a checkpoint")
    fields = _fields(root, root.name, {"state_dict_metadata", "storage_data"}, _UNREAD_FIELDS)
    described, places = fields["state_dict_metadata"], _places(fields["storage_data"])
    _require(type(described) is dict, "it has no dictionary of tensors")
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, FileRange | None] = {}
    for key, value in described.items():
        _require(type(key) is str, f"it has a key of type {type(key).__name__}")
        if type(value) is RecordedCall and value.name == f"{_DCP}.metadata.BytesStorageMetadata":
            objects[key] = places.get((key, None))
        else:
            tensors[key] = _tensor(key, value, places)
    return StoredState(tensors, objects)


_Places = Mapping[tuple[str, tuple[int, ...] | None], FileRange]


def _places(stored: Any) -> _Places:
    """Map tensor key and offsets to the location of each part. An object has no offsets: None."""
    _require(type(stored) is dict, "it has no dictionary of storage entries")
    places = {}
    for index, info in stored.items():
        where = _fields(index, f"{_DCP}.metadata.MetadataIndex", {"fqn"}, ("offset", "index"))
        key, offset = where["fqn"], where.get("offset")
        _require(type(key) is str, "it has a storage entry without a name")
        place = _fields(
            info,
            f"{_DCP}.filesystem._StorageInfo",
            {"relative_path", "offset", "length"},
            ("transform_descriptors",),
        )
        if place.get("transform_descriptors"):
            raise PlainPickleError(f"{_shown(key)} is compressed or otherwise transformed")
        file = place["relative_path"]
        if not is_file_name(file):
            raise PlainPickleError(f"{_shown(key)} is in {_shown(file)}, which is not a file name")
        start, length = _size(place["offset"], "the offset", key), _size(place["length"], "the length", key)
        places[key, None if offset is None else _shape(offset, key)] = FileRange(file, start, length)
    return places


def _tensor(key: str, described: Any, places: _Places) -> StoredTensor:
    fields = _fields(described, f"{_DCP}.metadata.TensorStorageMetadata", {"properties", "size", "chunks"})
    shape, chunks = _shape(fields["size"], key), fields["chunks"]
    _require(type(chunks) is list, f"{_shown(key)} has no list of parts")
    parts = tuple(_part(key, shape, chunk, places) for chunk in chunks)
    return StoredTensor(_dtype(fields["properties"], key), shape, parts)


def _part(key: str, shape: tuple[int, ...], chunk: Any, places: _Places) -> StoredChunk:
    fields = _fields(chunk, f"{_DCP}.metadata.ChunkStorageMetadata", {"offsets", "sizes"})
    offsets, sizes = (_shape(fields[name], key) for name in ("offsets", "sizes"))
    inside = len(offsets) == len(sizes) == len(shape) and all(
        offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not inside or (key, offsets) not in places:
        raise PlainPickleError(f"a part of {_shown(key)} is {'nowhere' if inside else 'outside of it'}")
    return StoredChunk(offsets, sizes, places[key, offsets])


def _dtype(properties: Any, key: str) -> torch.dtype:
    """Return the dtype, the only property that is used: tensors are read into memory of this process."""
    _require(_is_made(properties, f"{_DCP}.metadata.TensorProperties"), f"{_shown(key)} has no properties")
    state = properties.state
    _require(type(state) is tuple and len(state) == 5, f"{_shown(key)} has other properties than a tensor")
    dtype, layout = state[:2]
    _require(type(dtype) is Global and dtype.name in _TYPES, f"{_shown(key)} has no tensor type")
    strided = _is_made(layout, "torch.serialization._get_layout") and layout.args == ("torch.strided",)
    _require(strided, f"{_shown(key)} is not stored row by row")
    return _TYPES[dtype.name]


def _fields(made: Any, name: str, needed: set[str], more: Iterable[str] = ()) -> dict[str, Any]:
    """Return the attributes of one object, which must be exactly the needed ones, optionally with those in `more`."""
    if not _is_made(made, name) or made.args != ():
        raise PlainPickleError(f"it has another object instead of {name}")
    state = made.state
    if type(state) is not dict or not needed <= state.keys() <= needed.union(more):
        raise PlainPickleError(f"{name} has other attributes than expected")
    return state


def _is_made(value: Any, name: str) -> bool:
    return type(value) is RecordedCall and value.name == name


def is_file_name(name: object) -> TypeGuard[str]:
    """Return whether a value of a checkpoint names a file in the checkpoint's directory."""
    return type(name) is str and name.isprintable() and "/" not in name and name not in ("", ".", "..")


def _shape(size: Any, key: str) -> tuple[int, ...]:
    """Return the sizes of a pickled `torch.Size`."""
    held = _is_made(size, "torch.Size") and size.state is None and len(size.args) == 1 and size.args[0]
    if type(held) is not tuple or len(held) > _MAX_DIMENSIONS:
        raise PlainPickleError(f"{_shown(key)} has no shape")
    for length in held:
        _size(length, "the shape", key)
    if math.prod(held) > _LARGEST:
        raise PlainPickleError(f"{_shown(key)} has shape {held}, which is too large")
    return held


def _size(value: Any, description: str, key: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise PlainPickleError(f"{description} of {_shown(key)} is {_shown(value)}, which is not a size")
    return value


def _shown(value: Any) -> str:
    """Show a value in an error text: only the type unless the value is plain, as it may be large or contain itself."""
    if type(value) not in (str, int):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise PlainPickleError(problem)
