"""Files of a distributed checkpoint: written by this process alone, and read as data from any writer.

megatron-core reads `.metadata`, `common.pt` and, for a checkpoint with objects, parts of `*.distcp` as pickles, which
are programs. None of its readers is used here: `.metadata` says where each tensor is (checkpoint_metadata.py),
torch_files.py reads the parts that hold tensors, and the common state provides plain values. The common state is
`common.pt` up to 0.18; 0.19 writes an object with the key `common_state` instead. Other objects stay unread.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.safe_globals import SAFE_GLOBALS
from torch import Tensor
from torch.distributed import checkpoint

from megatron_ext.errors import CheckpointError
from megatron_ext.files import open_regular, read_bytes, read_json
from megatron_ext.mcore.checkpoint.checkpoint_metadata import (
    METADATA_FILE,
    StoredChunk,
    StoredState,
    StoredTensor,
    is_file_name,
)
from megatron_ext.mcore.checkpoint.plain_pickle import PlainPickleError, RecordedCall
from megatron_ext.mcore.checkpoint.torch_files import Archive, FileSlice, read_tensor

BACKEND = "torch_dist"
COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state"
_COMMON_KEY = f"{COMMON_OBJECT}/shard_0_1"
_LONGEST_COMMON_STATE = 64 * 1024**2  # bytes; Megatron-LM writes a few kilobytes
_MAX_VALUES = 1_000_000  # in the arguments of a run
_ARCHIVE_OVERHEAD = 64 * 1024  # bytes of a part in addition to its tensor's; about a thousand for torch
_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
# Enumerations that only later versions than 0.16.1 have; they are not pickled by name, as they need Python 3.12.
_LATER_ENUMERATIONS = tuple(
    f"megatron.core.transformer.enums.{name}" for name in ("CudaGraphModule", "InferenceCudaGraphScope")
)
# Classes that the common state may name; except for namespaces, their contents stay unread.
_COMMON = frozenset(
    (
        *(f"{kind.__module__}.{kind.__qualname__}" for kind in SAFE_GLOBALS),
        *_LATER_ENUMERATIONS,
        *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath")),
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        *(f"{module}.{name}" for module in ("__builtin__", "builtins") for name in ("set", "frozenset", "complex")),
        *(f"torch.{name}" for name in vars(torch) if isinstance(vars(torch)[name], torch.dtype) or "Storage" in name),
        *(f"torch._utils.{name}" for name in ("_rebuild_tensor_v2", "_rebuild_parameter")),
        "_codecs.encode",
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
    )
)
# Members of the enumerations among them, which Python 3.11.0 to 3.11.3 pickle by name.
_ENUMERATIONS = {
    f"{kind.__module__}.{kind.__qualname__}": frozenset(kind.__members__)
    for kind in SAFE_GLOBALS
    if isinstance(kind, enum.EnumMeta)
}
_Box = tuple[slice, ...]
MANIFEST_FILE = "integrity.json"
_ALGORITHM = "sha256"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LONGEST_MANIFEST = 64 * 1024**2  # bytes; a manifest of 100,000 files has 10 MB
_CHUNK = 16 * 1024**2  # bytes that are read at a time


def write_state(state: ShardedStateDict, directory: Path) -> None:
    """Write a sharded state in the `torch_dist` format of any megatron-core from 0.16.1 on, by this process alone.

    Every rank calls this: `.metadata`, one `.distcp` file per rank, `common.pt`, and `metadata.json` last. 0.19 reads
    `common.pt`, too; earlier versions read nothing else.

    Upstream's writer forks a process for each file, with threads and devices open, and spawns one more that imports the
    main module again (seconds); without psutil it never returns. That writer is meant for saving during training.

    Args:
        state: Tensors and objects that are sharded, and the common state; changed as upstream's `save` does.
        directory: An empty directory that all ranks share.

    Raises:
        CheckpointingException: The ranks' parts do not fit together.
        CheckpointException: A rank cannot write its part.
        OSError: The first rank cannot write the common state.
    """
    sharded, common = save_preprocess(state)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, for functions that upstream calls
        checkpoint.save(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=checkpoint.FileSystemWriter(str(directory), thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
    if torch.distributed.get_rank() == 0:
        torch.save(common, directory / COMMON_FILE)
        save_config(CheckpointingConfig(BACKEND), str(directory))


def read_tensors(state: Mapping[str, ShardedStateDict], stored: StoredState, directory: Path) -> dict[str, Tensor]:
    """Read the tensors that a sharded state describes.

    A tensor is read into the memory that its description names, in that memory's type; a tensor assembled from parts is
    in new memory.

    Args:
        state: Name -> requested tensor. Shapes must equal the stored ones, or be padded where that is allowed.
        stored: Result of `read_metadata` for the directory.
        directory: Directory of the files.

    Raises:
        CheckpointError: An object is requested, or a file is missing, damaged or not readable as data.
    """
    with contextlib.ExitStack() as stack:
        reader = _PartReader(directory, stored, stack)
        return {name: reader.read(sharded) for name, sharded in state.items()}


class _PartReader:
    """Reader of the files that hold the parts of tensors; each file is opened once."""

    def __init__(self, directory: Path, stored: StoredState, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stored = stored
        self._stack = stack
        self._files: dict[str, tuple[BinaryIO, int]] = {}

    def read(self, sharded: ShardedTensor | ShardedTensorFactory) -> Tensor:
        if isinstance(sharded, ShardedTensor):
            return self._tensor(sharded)
        if isinstance(sharded, ShardedObject):
            raise CheckpointError(f"{self._directory}: object {sharded.key} is a pickle, and pickles are not loaded")
        return sharded.merge_fn(dict_list_map_outplace(self.read, sharded.build()))

    def _tensor(self, wanted: ShardedTensor) -> Tensor:
        assert wanted.flattened_range is None, wanted
        stored = self._stored.tensors[wanted.key]
        held = sum(math.prod(part.sizes) for part in stored.parts)
        if held != math.prod(stored.shape):
            raise CheckpointError(f"{self._directory}: the stored parts of {wanted.key} do not cover the tensor")
        data = wanted.data
        if data is None:
            data = torch.zeros(wanted.local_shape, dtype=wanted.dtype)
        sizes = (1,) * wanted.prepend_axis_num + tuple(wanted.local_shape)
        target = data.detach().view(sizes)
        if wanted.allow_shape_mismatch:  # rows beyond the stored ones
            target.zero_()
        for part in stored.parts:
            box = _intersection(tuple(wanted.global_offset), sizes, part)
            if box is not None:
                target[box[0]].copy_(self._part(wanted.key, part, stored, box[1]))
        return data

    def _part(self, key: str, part: StoredChunk, stored: StoredTensor, box: _Box) -> Tensor:
        """Return a box of a stored part; whole rows of the part are read."""
        place = part.place
        where = f"{self._directory / place.file}: tensor {key}"
        file, size = self._open(place.file)
        needed = math.prod(part.sizes) * stored.dtype.itemsize
        if place.start + place.length > size or not needed <= place.length <= needed + _ARCHIVE_OVERHEAD:
            raise CheckpointError(
                f"{where} cannot be read: {place.length} bytes from byte {place.start} on of a file of {size} are not "
                f"what {needed} bytes of tensor take"
            )
        try:
            found = read_tensor(FileSlice(file, place.start, place.length), stored.dtype, part.sizes, *box[:1])
            whole_rows = (slice(None), *box[1:])
            return found[whole_rows] if box else found
        except PlainPickleError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from error

    def _open(self, name: str) -> tuple[BinaryIO, int]:
        if name not in self._files:
            file = self._stack.enter_context(open_regular(self._directory / name, CheckpointError))
            self._files[name] = (file, os.fstat(file.fileno()).st_size)
        return self._files[name]


def _intersection(offset: tuple[int, ...], sizes: tuple[int, ...], part: StoredChunk) -> tuple[_Box, _Box] | None:
    """Intersect a wanted box with a stored part: the common box in coordinates of either; None if it is empty."""
    ours, foreign = [], []
    for begin, size, stored_begin, stored_size in zip(offset, sizes, part.offsets, part.sizes, strict=True):
        low, high = max(begin, stored_begin), min(begin + size, stored_begin + stored_size)
        if low >= high:
            return None
        ours.append(slice(low - begin, high - begin))
        foreign.append(slice(low - stored_begin, high - stored_begin))
    return tuple(ours), tuple(foreign)


def read_common_state(directory: Path, stored: StoredState) -> dict[str, object]:
    """Read the values that are not tensors: arguments, iteration, scheduler state. Namespaces are `SimpleNamespace`s.

    A value of any other class, or a tensor, becomes a `RecordedCall` that names its class and nothing else.

    Args:
        directory: Directory of the files.
        stored: Result of `read_metadata` for the directory.

    Raises:
        CheckpointError: There is no common state, or it is damaged, or names a class that is not allowed.
    """
    path = common_source(directory)
    is_file = path != directory
    where, content = str(path), b""
    if is_file:
        content = read_bytes(path, _LONGEST_COMMON_STATE, CheckpointError)
    else:
        where, content = _common_object(directory, stored)
    try:
        common = Archive(io.BytesIO(content)).pickle(_COMMON, _ENUMERATIONS)
        if not is_file and type(common) is list and len(common) == 1:
            common = common[0]
        if type(common) is not dict:
            raise CheckpointError(f"{where} does not hold a dictionary")
        count = iter(range(_MAX_VALUES))
        return {str(key): _plain(value, count, depth=8) for key, value in common.items()}
    except PlainPickleError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error


def common_source(directory: Path) -> Path:
    """Return what to name in messages about values of the common state: its file, else the checkpoint."""
    path = directory / COMMON_FILE
    return path if os.path.lexists(path) else directory


def _common_object(directory: Path, stored: StoredState) -> tuple[str, bytes]:
    """Return the name and the bytes of the object with the common state."""
    place = stored.objects.get(_COMMON_KEY)
    if place is None:
        raise CheckpointError(f"{directory} has no {COMMON_FILE}, and no {COMMON_OBJECT} in {METADATA_FILE}")
    where = f"{directory / place.file}: object {COMMON_OBJECT}"
    if place.length > _LONGEST_COMMON_STATE:
        raise CheckpointError(f"{where} has {place.length} bytes and must have at most {_LONGEST_COMMON_STATE}")
    with open_regular(directory / place.file, CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(min(place.start, size))
        content = file.read(place.length)
    if len(content) < place.length:
        raise CheckpointError(
            f"{where} cannot be read: {place.length} bytes from byte {place.start} on are not in a file of {size}"
        )
    return where, content


def _plain(value: Any, count: Iterator[int], depth: int) -> Any:
    """Copy the value into new lists, dictionaries and namespaces, without cycles or shared objects.

    Each value takes a number of `count`, which ends the copy when it is exhausted.
    """
    if next(count, None) is None or depth == 0:
        raise PlainPickleError(f"it has more than {_MAX_VALUES} values, or too deep nesting")
    if type(value) in (list, tuple):
        return type(value)(_plain(item, count, depth - 1) for item in value)
    if type(value) is dict:
        return {key: _plain(item, count, depth - 1) for key, item in value.items()}
    if type(value) is RecordedCall:
        is_namespace = value.name in _NAMESPACES and value.args == () and type(value.state) is dict
        if is_namespace and all(type(name) is str for name in value.state):
            return SimpleNamespace(**_plain(value.state, count, depth - 1))
        return RecordedCall(value.name, ())
    return value


def verify_files(directory: Path, share: int = 0, shares: int = 1) -> None:
    """Compare files with their digests in the manifest; without a manifest there is nothing to verify.

    megatron-core 0.18 and later write the manifest on request: {"algorithm": "sha256", "files": {name: digest}}. It
    detects damage, not forgery: a checkpoint's author writes it, too.

    Args:
        directory: Directory of a checkpoint's files.
        share: Which of the shares to verify: all ranks together verify all files.
        shares: Number of shares.

    Raises:
        CheckpointError: A file is missing, not a regular one, or has another digest; or the manifest is damaged.
    """
    if not os.path.lexists(directory / MANIFEST_FILE):
        return
    digests = _read_manifest(directory / MANIFEST_FILE)
    for name in sorted(digests)[share::shares]:
        if _digest(directory / name) != digests[name]:
            raise CheckpointError(
                f"{directory / name} is damaged: its SHA-256 is not that in {MANIFEST_FILE}; copy the checkpoint again"
            )


def _read_manifest(path: Path) -> Mapping[str, str]:
    manifest = read_json(path, _LONGEST_MANIFEST)
    algorithm, digests = manifest.get("algorithm", _ALGORITHM), manifest.get("files")
    if algorithm != _ALGORITHM:
        raise CheckpointError(f"{path} has algorithm {str(algorithm)[:40]!r}; only {_ALGORITHM!r} is supported")
    if not isinstance(digests, dict):
        raise CheckpointError(f"{path} has no digests of files")
    for name, digest in digests.items():
        if not is_file_name(name):
            raise CheckpointError(f"{path} has a digest of {name[:100]!r}, which is not a file name")
        if type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise CheckpointError(f"{path} has no SHA-256 of {name[:100]!r}: 64 digits from 0 to f")
    return digests


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with open_regular(path, CheckpointError) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()
