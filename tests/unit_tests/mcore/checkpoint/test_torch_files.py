"""SE-1: tensors that torch saved come back as torch reads them; whatever else the bytes are ends in one error."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.mcore.checkpoint.plain_pickle import PlainPickleError
from megatron_ext.mcore.checkpoint.torch_files import Archive, FileSlice, read_tensor

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
VALUES = torch.arange(24.0).view(2, 3, 4) / 7
TENSORS: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: VALUES,
    "transposed": lambda: VALUES.transpose(0, 2),
    "a part": lambda: VALUES[1:, :2],
    "repeated": lambda: VALUES[:1, :1].expand(5, 6, 4),
    "one number": lambda: VALUES[0, 0, 1],
    "nothing": lambda: VALUES[:0],
    "a parameter's": lambda: torch.nn.Parameter(VALUES).data,
}


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("which", TENSORS)
def test_as_torch_reads_it(which: str, dtype: torch.dtype) -> None:
    tensor = TENSORS[which]().to(dtype)
    data = saved(tensor)
    ours = read_tensor(io.BytesIO(data), dtype, tuple(tensor.shape))
    theirs = torch.load(io.BytesIO(data), weights_only=True)
    assert ours.dtype is dtype
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("which", ["whole", "transposed", "a part"])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=str)
def test_some_rows(which: str, rows: slice) -> None:
    tensor = TENSORS[which]()
    data = saved(tensor)
    file = FileSlice(io.BytesIO(bytes(100) + data + bytes(100)), 100, len(data))
    rows = slice(rows.start, min(rows.stop, len(tensor)))
    if rows.start < rows.stop:
        assert torch.equal(read_tensor(file, torch.float32, tuple(tensor.shape), rows), tensor[rows])


def test_of_some_rows_no_others_are_read() -> None:
    """But for the archive's own bytes."""
    tensor = torch.arange(400_000.0).view(1000, 400)
    data, seen = saved(tensor), []

    class Watched(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            content = super().read(count)
            seen.append(len(content))
            return content

    rows = read_tensor(Watched(data), torch.float32, (1000, 400), slice(990, 1000))
    assert torch.equal(rows, tensor[990:])
    assert sum(seen) < len(data) / 10


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 2)], ids=str)
def test_rows_of_a_file_that_ends_too_early(rows: slice) -> None:
    """Truncated or overwritten files give one error, or rows of the right size."""
    data = saved(VALUES)
    header = data.index(b"PK\x03\x04", data.index(b"data/0") - 60)
    for spoiled in (data[:header] + b"XX" + data[header + 2 :], data.replace(b"PK\x03\x04", b"PK\x03\x05")):
        with pytest.raises(PlainPickleError):
            read_tensor(io.BytesIO(spoiled), torch.float32, (2, 3, 4), rows)


def test_out_of_the_middle_of_a_file() -> None:
    data = saved(VALUES)
    file = FileSlice(io.BytesIO(bytes(100) + data + bytes(100)), 100, len(data))
    assert torch.equal(read_tensor(file, torch.float32, (2, 3, 4)), VALUES)


def rewritten(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(VALUES))) as old, zipfile.ZipFile(file, "w", compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, change(record.filename, old.read(record)))
    return file.getvalue()


def replaced(end: str, old: bytes, new: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, content: content.replace(old, new) if name.endswith(end) else content


SPOILED = {
    "it has compressed": rewritten(lambda name, content: content, zipfile.ZIP_DEFLATED),
    "it has 4 bytes for a tensor": rewritten(lambda name, content: content[:4] if name.endswith("data/0") else content),
    "its data/0 is damaged": saved(VALUES).replace(VALUES.numpy().tobytes(), bytes(96)),
    "it is not a tensor of float32": rewritten(replaced("data.pkl", b"FloatStorage", b"HalfStorage")),
    "it names 'os.system'": rewritten(replaced("data.pkl", b"ctorch\nFloatStorage", b"cos\nsystem")),
    "its storage is missing": rewritten(replaced("data.pkl", b"\x01\x00\x00\x000q", b"\x01\x00\x00\x00/q")),
    "it has no data/7": rewritten(replaced("data.pkl", b"\x01\x00\x00\x000q", b"\x01\x00\x00\x007q")),
    "it is not an archive of torch's": b"nothing of the kind",
    "it has no data.pkl": rewritten(lambda name, content: content).replace(b"data.pkl", b"date.pkl"),
}


@pytest.mark.parametrize("message", SPOILED)
def test_refuses_invalid_tensors(message: str) -> None:
    with pytest.raises(PlainPickleError, match=message):
        read_tensor(io.BytesIO(SPOILED[message]), torch.float32, (2, 3, 4))


@pytest.mark.parametrize("shape", [(2, 3), (24,), (4, 3, 2), (2, 3, 5)])
def test_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(PlainPickleError, match="it is not a tensor of shape"):
        read_tensor(io.BytesIO(saved(VALUES)), torch.float32, shape)


def test_beyond_its_bytes() -> None:
    """Strides and an offset that would read what is not the tensor's."""
    data = saved(VALUES)
    strides = b"K\x0cK\x04K\x01\x87"
    assert strides in data
    for other in (b"K\x0dK\x04K\x01\x87", b"K\xffK\x04K\x01\x87"):
        changed = rewritten(replaced("data.pkl", strides, other))
        with pytest.raises(PlainPickleError, match="it has 96 bytes for a tensor"):
            read_tensor(io.BytesIO(changed), torch.float32, (2, 3, 4))


WHOLE = saved(VALUES)
CHANGES = st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6)


@settings(max_examples=400, deadline=None)
@given(CHANGES, st.integers(0, 40))
def test_any_bytes_give_a_tensor_or_one_error(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(WHOLE)
    for place, value in changes:
        data[place] = value
    del data[changes[0][0] : changes[0][0] + cut]
    try:
        assert read_tensor(io.BytesIO(data), torch.float32, (2, 3, 4)).shape == (2, 3, 4)
        Archive(io.BytesIO(data))
    except PlainPickleError:
        pass
