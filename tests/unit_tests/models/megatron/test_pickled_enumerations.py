"""SE-1: members of enumerations as Python 3.11.0 to 3.11.3 pickled them, through `getattr`, are data."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.mcore.checkpoint import plain_pickle
from megatron_ext.mcore.checkpoint.checkpoint_files import read_common_state
from megatron_ext.mcore.checkpoint.checkpoint_metadata import read_metadata
from megatron_ext.mcore.checkpoint.plain_pickle import PlainPickleError, RecordedCall
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.unit_tests.support.saved_models import load_dist_checkpoint

CPU = torch.device("cpu")


class Color(enum.Enum):
    """Any enumeration."""

    RED = 1


KIND = f"{__name__}.Color"
ALLOWED = {KIND, "pathlib.Path", "collections.OrderedDict"}
COLORS = {KIND: ("RED",)}
# What Python 3.11.2 wrote, in protocols 2 and 4 (without a frame): [Color.RED, Color.RED].
MODULE = __name__.encode()
OLD = (
    b"\x80\x02]q\x00(c__builtin__\ngetattr\nq\x01c" + MODULE + b"\nColor\nq\x02X\x03\x00\x00\x00REDq\x03\x86q\x04Rq\x05"
    b"h\x05e.",
    b"\x80\x04]\x94(\x8c\x08builtins\x94\x8c\x07getattr\x94\x93\x94\x8c" + bytes([len(MODULE)]) + MODULE + b"\x94"
    b"\x8c\x05Color\x94\x93\x94\x8c\x03RED\x94\x86\x94R\x94h\x09e.",
)


class OldPickler(pickle.Pickler):
    """Writes members of enumerations as those Pythons did."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def old_pickle(value: object, protocol: int = 4) -> bytes:
    file = io.BytesIO()
    OldPickler(file, protocol).dump(value)
    return file.getvalue()


@pytest.mark.parametrize("data", [*OLD, *(old_pickle([Color.RED] * 2, protocol) for protocol in (2, 3, 4, 5))], ids=len)
def test_a_member_is_its_class_and_its_name(data: bytes) -> None:
    assert pickle.loads(data) == [Color.RED] * 2, "the control: this is what it says"
    first, second = plain_pickle.load(data, ALLOWED, enumerations=COLORS)
    assert (type(first), first.name, first.args, first.state) == (RecordedCall, KIND, ("RED",), None)
    assert second is first


COLOR, PATH = b"c" + KIND.replace(".Color", "").encode() + b"\nColor\n", b"cpathlib\nPath\n"
GETATTR = b"\x80\x04cbuiltins\ngetattr\n"


def called(on: bytes, name: str, more: bytes = b"") -> bytes:
    """`getattr(on, name, *more)`, a whole pickle."""
    return GETATTR + b"(" + on + b"\x8c" + bytes([len(name)]) + name.encode() + more + b"tR."


HOSTILE = {
    "another class": called(PATH, "mkdir"),
    "another class of that name's member": called(PATH, "RED"),
    "no member": called(COLOR, "BLUE"),
    "a part of a member": called(COLOR, "R"),
    "nothing": called(COLOR, ""),
    **{f"dunder {name}": called(COLOR, name) for name in ("__class__", "__reduce_ex__", "__members__", "__init__")},
    "its base's": called(COLOR, "mro"),
    "the class as text": called(b"\x8c" + bytes([len(KIND)]) + KIND.encode(), "RED"),
    "of a member": called(called(COLOR, "RED")[len(b"\x80\x04") : -1], "RED"),
    "with a default": called(COLOR, "RED", b"N"),
    "a name that is no text": GETATTR + COLOR + b"C\x03RED\x86R.",
    "one argument": GETATTR + COLOR + b"\x85R.",
    "no tuple": GETATTR + b"](" + COLOR + b"\x8c\x03REDeR.",
    "as a class": GETATTR + COLOR + b"\x8c\x03RED\x86\x81.",
    "attributes of it": GETATTR + b"}b.",
    "a key": b"\x80\x04}cbuiltins\ngetattr\nNs.",
    "of getattr": called(b"cbuiltins\ngetattr\n", "RED"),
    "another builtin": GETATTR.replace(b"getattr", b"setattr") + COLOR + b"\x8c\x03RED\x86R.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_else_is_looked_up(what: str) -> None:
    with pytest.raises(PlainPickleError) as caught:
        plain_pickle.load(HOSTILE[what], ALLOWED, enumerations=COLORS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", OLD, ids=len)
def test_without_enumerations_there_is_no_getattr(data: bytes) -> None:
    with pytest.raises(PlainPickleError, match=r"it names '(__builtin__|builtins)\.getattr', which is not allowed"):
        plain_pickle.load(data, ALLOWED)
    with pytest.raises(PlainPickleError, match="enumeration that checkpoints do not use"):
        plain_pickle.load(data, ALLOWED, enumerations={"pathlib.Path": ("RED",)})
    with pytest.raises(PlainPickleError, match=f"it names '{KIND}'"):
        plain_pickle.load(data, (), enumerations=COLORS)


def rewritten(path: Path, write: Callable[[object], bytes]) -> None:
    path.write_bytes(write(pickle.loads(path.read_bytes())))


def test_a_checkpoint_of_those_pythons(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """The checkpoint's `.metadata` and `common.pt` name the enumeration alike, and it loads; other attributes fail."""
    saved = tmp_path / "checkpoint"
    save_dist_checkpoint(saved, tiny_model, tiny_config)
    stored = read_metadata(saved)
    honest = (saved / ".metadata").read_bytes()
    rewritten(saved / ".metadata", old_pickle)
    assert b"getattr" in (saved / ".metadata").read_bytes()
    assert read_metadata(saved) == stored
    loaded, _ = load_dist_checkpoint(saved)
    assert torch.equal(loaded.decoder.final_norm.weight, tiny_model.decoder.final_norm.weight)
    spoiled = (saved / ".metadata").read_bytes().replace(b"TORCH_CONTIGUOUS_FORMAT", b"__subclasses__.__call__")
    (saved / ".metadata").write_bytes(spoiled)
    with pytest.raises(CheckpointError, match="enumeration that checkpoints do not use"):
        read_metadata(saved)
    (saved / ".metadata").write_bytes(honest)
    torch.save({"args": {"backend": AttnBackend.flash, "layers": 3}}, saved / "common.pt", pickle_module=_OldModule)
    common: Any = read_common_state(saved, stored)
    assert (common["args"]["layers"], type(common["args"]["backend"])) == (3, RecordedCall)


class _OldModule:
    """Stand-in for the module `pickle`, for `torch.save`."""

    Pickler = OldPickler
    __name__ = "pickle"
    dumps = staticmethod(pickle.dumps)
    dump = staticmethod(pickle.dump)
