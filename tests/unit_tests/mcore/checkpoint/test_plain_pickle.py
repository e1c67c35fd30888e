"""SE-1: pickles are read as data, as by Python's own reader; any other content is refused."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.mcore.checkpoint import plain_pickle
from megatron_ext.mcore.checkpoint.plain_pickle import Global, PlainPickleError, RecordedCall

PROTOCOLS = (2, 3, 4, 5)
WHOLE = st.integers(-(2**63), 2**63 - 1)
SCALARS = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers(-(2**31), 2**31)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=20,
)
PLAIN_NAMES = {"collections.OrderedDict", "_codecs.encode", "__builtin__.bytes"}


def same(ours: Any, theirs: Any) -> bool:
    """Equal values of equal types; bytes are a call before protocol 3, and an ordered dictionary is a plain one."""
    if isinstance(ours, RecordedCall):
        assert ours.name in ("_codecs.encode", "__builtin__.bytes"), ours
        return (ours.args[0].encode("latin1") if ours.args else b"") == theirs
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_plain_values_as_python_reads_them(value: Any, protocol: int) -> None:
    assert same(plain_pickle.load(pickle.dumps(value, protocol), PLAIN_NAMES), value)


def test_values_that_hold_one_another() -> None:
    value: list[Any] = [1]
    value.append(value)
    loaded = plain_pickle.load(pickle.dumps(value, 4), ())
    assert loaded[0] == 1
    assert loaded[1] is loaded


class Point:
    """Any class."""

    def __init__(self, x: int) -> None:
        self.x = x


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_are_what_was_called_and_with_what(protocol: int) -> None:
    name = f"{Point.__module__}.Point"
    first, second, kind = plain_pickle.load(pickle.dumps([Point(3), Point(4), Point], protocol), {name})
    assert (type(first), first.name, first.args, first.state) == (RecordedCall, name, (), {"x": 3})
    assert second.state == {"x": 4}
    assert kind == Global(name)
    with pytest.raises(PlainPickleError, match=f"it names '{name}'"):
        plain_pickle.load(pickle.dumps(Point(3), protocol), {"other.Point"})


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (str(self.folder),)


class RunsInBuiltin(Runs):
    """Attack that runs code through a builtin."""

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return exec, (f"import os; os.mkdir({str(self.folder)!r})",)


class WithPersistentIds(pickle.Pickler):
    """Refers to the object as something kept elsewhere."""

    def persistent_id(self, value: object) -> object:
        return 7 if isinstance(value, Runs) else None


def of_protocol(number: int, kind: type[Runs] = Runs) -> Callable[[Path], bytes]:
    return lambda folder: pickle.dumps(kind(folder), number)


def by_extension(opcode: bytes) -> Callable[[Path], bytes]:
    """The function under a number that the process has registered."""
    code = {b"\x82": b"\x82\x70", b"\x83": b"\x83\x70\x00", b"\x84": b"\x84\x70\x00\x00\x00"}[opcode]
    return lambda folder: b"\x80\x02" + code + text(folder) + b"\x85R."


def text(folder: Path) -> bytes:
    """The instruction that puts the folder's name on the stack."""
    name = str(folder).encode()
    return b"X" + len(name).to_bytes(4, "little") + name


ATTACKS: dict[str, Callable[[Path], bytes]] = {
    **{f"reduce, protocol {number}": of_protocol(number) for number in range(6)},
    **{f"builtin, protocol {number}": of_protocol(number, RunsInBuiltin) for number in (0, 2, 4)},
    "stack global": lambda folder: b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93" + text(folder) + b"\x85R.",
    "stack global of a method": lambda folder: (
        b"\x80\x04\x8c\x07pathlib\x8c\x0aPath.mkdir\x93\x8c\x07pathlib\x8c\x04Path\x93" + text(folder) + b"\x85R\x85R."
    ),
    "inst": lambda folder: b"(V" + str(folder).encode() + b"\niposix\nmkdir\n.",
    "obj": lambda folder: b"(cposix\nmkdir\n" + text(folder) + b"o.",
    "newobj with keywords": lambda folder: b"\x80\x04cpathlib\nPath\n" + text(folder) + b"\x85}\x92.",
    **{f"extension {opcode.hex()}": by_extension(opcode) for opcode in (b"\x82", b"\x83", b"\x84")},
}
ALLOWED = {"pathlib.Path", "collections.OrderedDict"}


@pytest.fixture
def extension() -> Any:
    """A number for `posix.mkdir`, until the test ends."""
    copyreg.add_extension("posix", "mkdir", 0x70)
    yield
    copyreg.remove_extension("posix", "mkdir", 0x70)
    copyreg.clear_extension_cache()


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_is_run(attack: str, tmp_path: Path, extension: None) -> None:
    """Our reader runs no code; as a control, Python's own reader does."""
    data = ATTACKS[attack](tmp_path / "made")
    with pytest.raises(PlainPickleError) as caught:
        plain_pickle.load(data, ALLOWED)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()
    pickle.loads(data)
    assert (tmp_path / "made").exists() or attack == "newobj with keywords", "the control: it would have run"


def test_persistent_ids_only_where_allowed(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        WithPersistentIds(file, 4).dump([Runs(tmp_path)])
    data = (tmp_path / "x").read_bytes()
    with pytest.raises(PlainPickleError, match="it refers to external storage"):
        plain_pickle.load(data, ())
    [made] = plain_pickle.load(data, (), persistent_ids=True)
    assert (made.name, made.args) == (plain_pickle.PERSISTENT_ID, (7,))


SETTING = {
    "a class": b"cpathlib\nPath\n",
    "a dictionary": b"}",
    "an ordered dictionary": b"ccollections\nOrderedDict\n)R",
    "a list": b"]",
    "an object that has its state": b"cpathlib\nPath\n)\x81}b",
}


@pytest.mark.parametrize("what", SETTING)
def test_attributes_are_given_to_what_was_made_once_and_to_nothing_else(what: str) -> None:
    with pytest.raises(PlainPickleError, match="it sets attributes of a "):
        plain_pickle.load(b"\x80\x02" + SETTING[what] + b"}X\x05\x00\x00\x00itemsNsb.", ALLOWED)


OTHERS = {
    "it is not a complete pickle": b"",
    "it is not a complete pickle, byte 3": b"\x80\x02N",
    "it is cut off": b"\x80\x02X\xff\xff\xff\xffab",
    "it has instruction 0x50": b"P1\n.",
    "it has instruction 0x96": b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x00.",
    "its stack is empty": b"\x80\x02.",
    "its stack is empty, ": b"\x80\x02N(a.",
    "it expects a list and has another object": b"\x80\x02}Na.",
    "it expects a dict and has another object": b"\x80\x02]NNs.",
    "it has a key of type tuple": b"\x80\x02})Ns.",
    "it has a key of type Global": b"\x80\x02}cpathlib\nPath\nNs.",
    "it has a key without a value": b"\x80\x02}(Nu.",
    "it calls an object without a name": b"\x80\x02N)R.",
    "it calls an object without a name, ": b"\x80\x02cpathlib\nPath\n]R.",
    "it has a name without an end": b"\x80\x02c" + b"a" * 2000,
    "it has a name that is not a text": b"\x80\x04NN\x93.",
    "it has a whole number of 200 bytes": b"\x80\x02\x8a\xc8" + b"\x01" * 200 + b".",
    "it has instruction 0x8b": b"\x80\x02\x8b\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("message", OTHERS)
def test_refuses_other_pickles(message: str) -> None:
    with pytest.raises(PlainPickleError, match=message):
        plain_pickle.load(OTHERS[message], ALLOWED)


def test_work_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that makes Python's reader allocate 32 GB, a tuple whose hash takes 2**60 steps, many instructions."""
    assert plain_pickle.load(b"\x80\x02Nr\xff\xff\xff\x7f.", ()) is None
    doubled = b"\x80\x04N\x94" + b"".join(b"h" + bytes((i,)) * 1 + b"h" + bytes((i,)) + b"\x86\x94" for i in range(60))
    assert plain_pickle.load(doubled + b".", ()) is not None
    with pytest.raises(PlainPickleError, match="a key of type tuple"):
        plain_pickle.load(b"\x80\x04}" + doubled[2:] + b"Ns.", ())
    monkeypatch.setattr(plain_pickle, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(PlainPickleError, match="it has more than 1000 instructions"):
        plain_pickle.load(b"N" * 2000 + b".", ())


WHOLE_PICKLE = pickle.dumps([Path("a"), {"b": (1, 2.5, None, True)}, collections.OrderedDict(c=[1, 2])], 4)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE_PICKLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_bytes_give_a_value_or_one_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE_PICKLE)
    for place, value in changes:
        data[place] = value
    with contextlib.suppress(PlainPickleError):
        plain_pickle.load(bytes(data), ALLOWED | {"pathlib.PosixPath"})
