"""SE-1: a distributed checkpoint runs no code, whatever its files hold. Payloads make a folder beside it."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.mcore.checkpoint import checkpoint_files
from megatron_ext.mcore.checkpoint.checkpoint_files import read_common_state, read_tensors
from megatron_ext.mcore.checkpoint.checkpoint_metadata import read_metadata
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support.saved_models import load_dist_checkpoint

CPU = torch.device("cpu")
TARGET = "decoder.final_norm.weight"


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (str(self.folder),)


class With:
    """Something with attributes that unpickling gives it: of its own, or by way of `setattr`."""

    def __init__(self, value: object, state: dict | None, slots: dict | None = None) -> None:
        self.value = value
        self.state = state if slots is None else (state, slots)


class Pickler(pickle._Pickler):  # Python's implementation can be made to write unusual instructions
    """Writes `With` as an instruction that gives attributes."""

    def save(self, obj: object, save_persistent_id: bool = True) -> None:
        if type(obj) is not With:
            super().save(obj, save_persistent_id)
            return
        if type(obj.value) is OrderedDict:
            self.save_reduce(OrderedDict, (), None, None, iter(list(obj.value.items())), obj=obj)
        else:
            super().save(obj.value)
        super().save(obj.state)
        self.write(pickle.BUILD)


def pickled(value: object, protocol: int = 4) -> bytes:
    file = io.BytesIO()
    Pickler(file, protocol).dump(value)
    return file.getvalue()


@pytest.fixture
def saved(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    save_dist_checkpoint(tmp_path / "checkpoint", tiny_model, tiny_config)
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def torchs_own_function() -> Iterator[None]:
    """The control below gives attributes to a function of torch's, which other tests need as it was."""
    function = torch.serialization._get_layout
    before = function.__defaults__, dict(function.cache)
    yield
    function.__defaults__, function.cache = before


def read_by_torch(directory: Path) -> Metadata:
    return pickle.loads((directory / ".metadata").read_bytes())


def bytes_for_a_tensor(directory: Path, folder: Path, *, hidden: bool) -> bytes:
    """A `.metadata` whose target is bytes, with the payload at its place; it looks like a tensor if it is hidden.

    `items()` of the dictionary is then a function of torch's, which was given what it is to answer.
    """
    metadata = read_by_torch(directory)
    described: dict[str, Any] = metadata.state_dict_metadata
    honest = [(key, value) for key, value in described.items() if isinstance(value, TensorStorageMetadata)]
    payload = io.BytesIO()
    torch.save(Runs(folder), payload)
    index = next(index for index in metadata.storage_data if index.fqn == TARGET)
    info = metadata.storage_data.pop(index)
    (directory / "__9_9.distcp").write_bytes(payload.getvalue())
    info.relative_path, info.offset, info.length = "__9_9.distcp", 0, len(payload.getvalue())
    metadata.storage_data[type(index)(TARGET)] = info
    fake = BytesStorageMetadata()
    fake.size, fake.properties, fake.chunks = described[TARGET].size, described[TARGET].properties, []
    contents = OrderedDict({**described, TARGET: fake})
    if hidden:
        function = torch.serialization._get_layout
        answers = {"torch.jagged": honest, "torch.strided": torch.strided}
        answer = With(function, None, {"__defaults__": ("torch.jagged",), "cache": answers})
        contents = With(contents, {"items": answer})
    metadata.state_dict_metadata = contents
    return pickled(metadata)


def attributes_of_a_class(directory: Path, folder: Path) -> bytes:
    """The class of everything in `.metadata` is given a method."""
    return pickled([With(Metadata, None, {"storage_data": None}), read_by_torch(directory)])


def in_planners_data(directory: Path, folder: Path) -> bytes:
    metadata = read_by_torch(directory)
    metadata.planner_data = Runs(folder)
    return pickled(metadata)


METADATA: dict[str, Callable[[Path, Path], bytes]] = {
    **{f"protocol {number}": lambda _, folder, n=number: pickled(Runs(folder), n) for number in range(6)},
    "among the planner's data": in_planners_data,
    "bytes for a tensor": lambda directory, folder: bytes_for_a_tensor(directory, folder, hidden=False),
    "bytes for a tensor, hidden": lambda directory, folder: bytes_for_a_tensor(directory, folder, hidden=True),
    "attributes of a class": attributes_of_a_class,
}


@pytest.mark.parametrize("attack", METADATA)
def test_metadata_runs_nothing(attack: str, saved: Path, tmp_path: Path) -> None:
    data = METADATA[attack](saved, tmp_path / "made")
    shutil.rmtree(tmp_path / "made", ignore_errors=True)
    (saved / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        load_dist_checkpoint(saved)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()
    assert not hasattr(Metadata, "storage_data") or Metadata.storage_data is None


def test_the_hidden_bytes_look_like_a_tensor_to_python(saved: Path, tmp_path: Path) -> None:
    """The control: listing the dictionary shows a tensor, a look-up gives bytes, which torch runs."""
    metadata = pickle.loads(bytes_for_a_tensor(saved, tmp_path / "made", hidden=True))
    described = metadata.state_dict_metadata
    assert isinstance(dict(described.items())[TARGET], TensorStorageMetadata)
    assert isinstance(described[TARGET], BytesStorageMetadata)
    torch.load(saved / "__9_9.distcp", weights_only=False)
    assert (tmp_path / "made").is_dir()


def zipped(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, pickle_module=PicklesEverything)
    return file.getvalue()


class PicklesEverything:
    """Stand-in for the module `pickle`, for `torch.save`."""

    Pickler = Pickler
    __name__ = "pickle"
    dumps = staticmethod(pickle.dumps)
    dump = staticmethod(pickle.dump)


def without_zip(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


COMMON: dict[str, Callable[[Path], bytes]] = {
    "an argument": lambda folder: zipped({"args": Namespace(num_layers=Runs(folder))}),
    "the arguments": lambda folder: zipped({"args": Runs(folder)}),
    "a key": lambda folder: zipped({"args": {"a": 1}, "b": [Runs(folder)]}),
    "attributes of a class": lambda folder: zipped([With(Namespace, None, {"num_layers": Runs(folder)})]),
    "an older form": lambda folder: without_zip({"args": Runs(folder)}),
    "a bare pickle": lambda folder: pickle.dumps({"args": Runs(folder)}),
}


@pytest.mark.parametrize("place", ["common.pt", "object common_state"])
@pytest.mark.parametrize("attack", COMMON)
def test_common_state_runs_nothing(
    attack: str, place: str, tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    """SE-1: a file of 0.18 and an object of 0.19. The control: Python's own reader, or torch's, runs it."""
    tensors = megatron_lm.stored_tensors(tiny_model, tiny_config)
    directory = megatron_lm.write(tmp_path / "run", tensors, megatron_lm.arguments(tiny_config)) / "iter_0000100"
    data = COMMON[attack](tmp_path / "made")
    if place == "common.pt":
        (directory / place).write_bytes(data)
    else:
        megatron_lm.as_later_versions_write(directory, data)
    with pytest.raises(CheckpointError, match=f"{place} cannot be read: ") as caught:
        load_dist_checkpoint(tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()
    if attack == "a bare pickle":
        pickle.loads(data)
    elif attack != "attributes of a class":
        torch.load(io.BytesIO(data), weights_only=False)
    assert (tmp_path / "made").exists() == (attack != "attributes of a class")


def place_of(directory: Path, key: str) -> tuple[int, int]:
    info = next(info for index, info in read_by_torch(directory).storage_data.items() if index.fqn == key)
    return info.offset, info.length


PARTS: dict[str, Callable[[Path], object]] = {
    "it names 'posix.mkdir'": Runs,
    "it names 'argparse.Namespace'": lambda folder: Namespace(x=Runs(folder)),
    "it is not a tensor of shape": lambda folder: torch.ones(16, 2),
    "it is not a tensor of bfloat16|it is not a tensor of float32": lambda folder: torch.ones(32, dtype=torch.float64),
    "it names 'torch._utils._rebuild_sparse_tensor'": lambda folder: torch.ones(32).to_sparse(),
}


@pytest.mark.parametrize("message", PARTS)
def test_a_part_that_is_no_tensor(message: str, saved: Path, tmp_path: Path) -> None:
    """The place of a tensor holds something else."""
    start, length = place_of(saved, TARGET)
    payload = zipped(PARTS[message](tmp_path / "made"))
    content = bytearray((saved / "__0_0.distcp").read_bytes())
    shift = len(content)
    metadata = read_by_torch(saved)
    for index, info in metadata.storage_data.items():
        if index.fqn == TARGET:
            info.offset, info.length = shift, len(payload)
    (saved / "__0_0.distcp").write_bytes(content + payload)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"__0_0.distcp: tensor {TARGET} cannot be read: ({message})") as caught:
        load_dist_checkpoint(saved)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()
    assert (start, length) != (shift, len(payload))


def test_objects_stay_unread_and_cannot_be_asked_for(
    tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    """`_extra_state` that would run something is in a checkpoint which loads; the control: torch runs it."""
    tensors = megatron_lm.stored_tensors(tiny_model, tiny_config)
    key = "decoder.layers.0.mixer.in_proj._extra_state"
    extra = {"extra": ShardedObject(key, Runs(tmp_path / "made"), (1,), (0,))}
    megatron_lm.write(tmp_path / "run", tensors, megatron_lm.arguments(tiny_config), **extra)
    directory = tmp_path / "run" / "iter_0000100"
    loaded, _ = load_dist_checkpoint(directory)
    for name, value in tiny_model.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], value), name
    stored = read_metadata(directory)
    assert stored.objects.keys() == {f"{key}/shard_0_1"}
    with pytest.raises(CheckpointError, match=f"object {key} is a pickle, and pickles are not loaded"):
        read_tensors(extra, stored, directory)
    assert not (tmp_path / "made").exists()
    start, length = place_of(directory, f"{key}/shard_0_1")
    content = (directory / "__0_0.distcp").read_bytes()[start : start + length]
    torch.load(io.BytesIO(content), weights_only=False)
    assert (tmp_path / "made").exists()


def change(directory: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = read_by_torch(directory)
    edit(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def set_place(**fields: object) -> Callable[[Metadata], object]:
    def edit(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(fields)

    return edit


def set_chunk(**fields: object) -> Callable[[Metadata], object]:
    return lambda metadata: vars(metadata.state_dict_metadata[TARGET].chunks[0]).update(fields)


def set_tensor(**fields: object) -> Callable[[Metadata], object]:
    return lambda metadata: vars(metadata.state_dict_metadata[TARGET]).update(fields)


SPOILED: dict[str, Callable[[Metadata], object]] = {
    r"is in '\.\./checkpoint/__0_0\.distcp', which is not a file name": set_place(
        relative_path="../checkpoint/__0_0.distcp"
    ),
    r"is in '/etc/passwd', which is not a file name": set_place(relative_path="/etc/passwd"),
    r"is in '\.\.', which is not a file name": set_place(relative_path=".."),
    r"is in 'a\\nb', which is not a file name": set_place(relative_path="a\nb"),
    r"is in a bytes, which is not a file name": set_place(relative_path=b"a"),
    "the offset of .* is -1, which is not a size": set_place(offset=-1),
    "the length of .* is a bool, which is not a size": set_place(length=True),
    "99 bytes from byte .* are not what .* bytes of tensor take": set_place(length=99),
    "from byte 4611686018427387904 on": set_place(offset=2**62),
    "is compressed or otherwise transformed": set_place(transform_descriptors=["zstd"]),
    "_StorageInfo has other attributes than expected": set_place(more=1),
    "a part of 'decoder.final_norm.weight' is outside of it": set_chunk(sizes=torch.Size([33])),
    "a part of 'decoder.final_norm.weight' is nowhere": set_chunk(offsets=torch.Size([1]), sizes=torch.Size([31])),
    "the stored parts of decoder.final_norm.weight do not cover the tensor": set_chunk(sizes=torch.Size([31])),
    r"has shape .*, which is too large": set_tensor(size=torch.Size([2**40, 2**40])),
    "has no list of parts": set_tensor(chunks=None),
    "has no shape": set_tensor(size=[32]),
}


@pytest.mark.parametrize("message", SPOILED)
def test_refuses_invalid_metadata(message: str, saved: Path) -> None:
    change(saved, SPOILED[message])
    with pytest.raises(CheckpointError, match=message) as caught:
        load_dist_checkpoint(saved)
    assert "\n" not in str(caught.value)


def compressed(value: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("common/data.pkl", value)
    return file.getvalue()


def doubled_lists(times: int) -> list:
    doubled: list = []
    for _ in range(times):
        doubled = [doubled, doubled]
    return doubled


LARGE: dict[str, Callable[[], bytes]] = {
    "too deep nesting": lambda: zipped({"args": doubled_lists(40)}),
    "it has more than 1000000 values": lambda: zipped({"args": [[[0] * 1000] * 1000] * 1000}),
    "it has compressed": lambda: compressed(b"\x80\x02}." + bytes(10**6)),
    "has more than 1048576 bytes|at most 1048576": lambda: zipped({"args": "a" * 2**21}),
}


@pytest.mark.parametrize("place", ["file", "object"])
@pytest.mark.parametrize("message", LARGE)
def test_common_state_takes_no_more_than_it_is_long(
    message: str, place: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SE-1: lists that hold one another many times over, a compressed archive, and a long one."""
    monkeypatch.setattr(checkpoint_files, "_LONGEST_COMMON_STATE", 2**20)
    content = LARGE[message]()
    if place == "file":
        (saved / "common.pt").write_bytes(content)
    else:
        megatron_lm.as_later_versions_write(saved, content)
    with pytest.raises(CheckpointError, match=message):
        read_common_state(saved, read_metadata(saved))


def without_place(metadata: Metadata) -> None:
    for index in [index for index in metadata.storage_data if index.fqn.startswith("common_state")]:
        del metadata.storage_data[index]


MISPLACED: dict[str, Callable[[Metadata], object]] = {
    r"has no common\.pt, and no common_state in \.metadata": without_place,
    r"__0_0\.distcp: object common_state cannot be read: .* from byte 4611686018427387904 on are not": set_place(
        offset=2**62
    ),
    r"object common_state has 4611686018427387904 bytes and must have": set_place(length=2**62),
    r"__9_9\.distcp: No such file": set_place(relative_path="__9_9.distcp"),
    r"is in '/etc/passwd', which is not a file name": set_place(relative_path="/etc/passwd"),
    r"object common_state cannot be read: ": set_place(offset=1),
}


@pytest.mark.parametrize("message", MISPLACED)
def test_a_misplaced_common_state(message: str, saved: Path) -> None:
    megatron_lm.as_later_versions_write(saved)
    change(saved, MISPLACED[message])
    with pytest.raises(CheckpointError, match=message) as caught:
        read_common_state(saved, read_metadata(saved))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [{"args": 1}, [], [{}, {}], [1]], ids=str)
def test_a_common_state_in_another_form(value: object, saved: Path) -> None:
    """megatron-core 0.19 writes a list with one dictionary."""
    megatron_lm.as_later_versions_write(saved, zipped(value))
    if value == {"args": 1}:
        assert read_common_state(saved, read_metadata(saved)) == value
        return
    with pytest.raises(CheckpointError, match="object common_state does not hold a dictionary"):
        read_common_state(saved, read_metadata(saved))
