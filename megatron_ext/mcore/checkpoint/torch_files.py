"""Files of `torch.save`, read as data: a zip archive with a pickle, and the bytes of tensors beside it.

`torch.load(weights_only=True)` does not run a file's code either, but it constructs any class that some package of the
process has allowed (megatron-core allows numpy's arrays, whose states numpy trusts), and it decompresses records. Here
a pickle makes plain values only, and an archive takes no more memory than its own length.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Container
from typing import Any, BinaryIO, TypeGuard

import torch
from torch import Tensor

from megatron_ext.mcore.checkpoint import plain_pickle
from megatron_ext.mcore.checkpoint.plain_pickle import PERSISTENT_ID, Global, Members, PlainPickleError, RecordedCall

_PICKLE = "data.pkl"
_REBUILD = "torch._utils._rebuild_tensor_v2"
_TYPED_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
}
_TENSOR = frozenset((_REBUILD, "collections.OrderedDict", *_TYPED_STORAGES))
_LOCAL_MAGIC, _LOCAL_HEADER = b"PK\x03\x04", 30  # of a record; its last four bytes are the name and extra lengths
_CHUNK = 16 * 1024**2  # bytes that are read at a time
_MAX_RECORDS = 100_000  # per archive: two for each tensor, and a few more


class FileSlice(io.RawIOBase):
    """Range of bytes of a file, as a file; nothing is copied.

    Args:
        file: Open for reading; its position is moved.
        start: First byte of the slice.
        length: Bytes, all of which must be in the file.
    """

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def tell(self) -> int:
        """Return the read position, relative to the start of the slice."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the read position and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, count: int = -1) -> bytes:
        """Read at most `count` bytes; all remaining bytes if `count` is negative."""
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        content = self._file.read(left if count is None or count < 0 else min(count, left))
        self._at += len(content)
        return content


class Archive:
    """Zip archive written by torch.

    Args:
        file: The archive and nothing else.

    Raises:
        PlainPickleError: The file is not such an archive, or has compressed records.
    """

    def __init__(self, file: BinaryIO | FileSlice) -> None:
        self._file = file
        try:
            self._zip = zipfile.ZipFile(file, "r")
        except Exception as error:  # `zipfile` raises arbitrary errors for damaged archives
            raise PlainPickleError(f"it is not an archive of torch's: {error}") from error
        records = self._zip.infolist()
        if len(records) > _MAX_RECORDS or any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise PlainPickleError("it is not an archive of torch's: it has compressed or far too many records")
        # torch puts everything into one folder of any name.
        self._records = {record.filename.partition("/")[2]: record for record in records}

    def pickle(self, allowed: Container[str], enumerations: Members | None = None) -> object:
        """Return the plain value of the pickle, with tensors as `RecordedCall`; see `plain_pickle.load`."""
        content = bytes(self.record(_PICKLE))
        return plain_pickle.load(content, allowed, persistent_ids=True, enumerations=enumerations)

    def record(self, name: str) -> bytearray:
        """Read the bytes of one record."""
        record = self._record(name)
        content = bytearray()  # grows with the data, not with the length that the archive claims
        try:
            with self._zip.open(record) as file:
                while chunk := file.read(_CHUNK):
                    content += chunk
            return content
        except Exception as error:  # as above
            raise PlainPickleError(f"its {name} is damaged: {error}") from error

    def part(self, name: str, start: int, length: int) -> bytearray:
        """Read some bytes of one record. The rest of the record is not read, so its checksum is not verified."""
        record = self._record(name)
        if start + length > record.file_size:
            raise PlainPickleError(f"its {name} is too short")
        self._file.seek(record.header_offset)
        header = self._file.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or not header.startswith(_LOCAL_MAGIC):
            raise PlainPickleError(f"its {name} is damaged: no header")
        name_length, extra_length = struct.unpack("<HH", header[-4:])
        self._file.seek(record.header_offset + _LOCAL_HEADER + name_length + extra_length + start)
        content = bytearray()
        while len(content) < length and (chunk := self._file.read(min(_CHUNK, length - len(content)))):
            content += chunk
        if len(content) < length:
            raise PlainPickleError(f"its {name} is too short")
        return content

    def _record(self, name: str) -> zipfile.ZipInfo:
        if name not in self._records:
            raise PlainPickleError(f"it has no {name}")
        return self._records[name]


def read_tensor(
    file: BinaryIO | FileSlice, dtype: torch.dtype, shape: tuple[int, ...], rows: slice | None = None
) -> Tensor:
    """Read the only tensor of an archive to the host.

    Args:
        file: The archive and nothing else.
        dtype: Required dtype of the tensor.
        shape: Required shape of the tensor.
        rows: Rows to return; if they are contiguous, only they are read. None returns all rows.

    Raises:
        PlainPickleError: There is another tensor, or something else, or the archive is damaged.
    """
    archive = Archive(file)
    made = archive.pickle(_TENSOR)
    if type(made) is not RecordedCall or made.name != _REBUILD or len(made.args) < 4:
        raise PlainPickleError("it is not a tensor")
    storage, offset, size, stride = made.args[:4]
    key, count = _storage(storage, dtype)
    same_shape = _are_sizes(size) and size == shape
    if not same_shape or not _are_sizes(stride) or len(stride) != len(shape) or type(offset) is not int or offset < 0:
        raise PlainPickleError(f"it is not a tensor of shape {shape}")
    if rows is not None and rows != slice(0, shape[0]):
        if (offset, stride) == (0, _contiguous(shape)) and count == math.prod(shape):
            row = math.prod(shape[1:]) * dtype.itemsize
            content = archive.part(f"data/{key}", rows.start * row, (rows.stop - rows.start) * row)
            return torch.frombuffer(content, dtype=dtype).view(-1, *shape[1:])
        return read_tensor(file, dtype, shape)[rows]
    content = archive.record(f"data/{key}")
    last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    wanted = math.prod(shape)
    if len(content) != count * dtype.itemsize or (wanted and last >= count):
        raise PlainPickleError(f"it has {len(content)} bytes for a tensor of shape {shape}")
    if not wanted:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, stride, offset)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _storage(stored: Any, dtype: torch.dtype) -> tuple[str, int]:
    """Return the key of a tensor's storage and its number of elements."""
    where = stored.args[0] if type(stored) is RecordedCall and stored.name == PERSISTENT_ID else None
    if type(where) is not tuple or len(where) != 5 or where[0] != "storage":
        raise PlainPickleError("it is not a tensor with its own storage")
    _, kind, key, _, count = where
    if type(kind) is not Global or _TYPED_STORAGES.get(kind.name) is not dtype:
        raise PlainPickleError(f"it is not a tensor of {str(dtype).removeprefix('torch.')}")
    if type(key) is not str or not key.isdecimal() or not _are_sizes((count,)):
        raise PlainPickleError("its storage is missing")
    return key, count


def _are_sizes(values: object) -> TypeGuard[tuple[int, ...]]:
    return type(values) is tuple and all(type(value) is int and value >= 0 for value in values)
