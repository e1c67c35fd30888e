"""Untrusted pickles, read as data: nothing is imported, called or given attributes.

A pickle is a program for a stack machine. Python's own machine imports and calls the names in a pickle. This machine
knows the instructions that pickles of protocols 2 to 5 need for plain values and for objects of classes. An object
becomes a `RecordedCall`: the name of its class, the arguments of the call, and its state. The caller interprets them by
the names it expects. Any other instruction is refused.

Python 3.11.0 to 3.11.3 write a member of an enumeration as `getattr(Class, "NAME")`. This one call is accepted for the
classes and names that the caller lists; no attribute of a class is looked up.

`MAX_INSTRUCTIONS` and the number of bytes bound work and memory: no instruction makes a value longer than itself.
Python's `Unpickler` has no such bounds, whatever its `find_class` returns: one index of its memo allocates gigabytes, a
key of nested tuples is hashed for years, and an extension code that the process has used before returns the real
function.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

EMPTY_DICTIONARIES = ("collections.OrderedDict",)  # made without arguments, then filled like a dictionary
MAX_INSTRUCTIONS = 50_000_000  # of one pickle
_LONGEST_NAME = 1_000  # bytes of a module or a class
PERSISTENT_ID = "persistent id"  # name of the call that stands for a value stored outside the pickle
_MEMBER_OF = ("builtins.getattr", "__builtin__.getattr")  # the second name is written in protocol 2
_WHOLE_NUMBER_BYTES = 9  # 64 bits, with or without a sign
_KEY_TYPES = (str, int, bool, float, type(None))


class PlainPickleError(ValueError):
    """Raised for a pickle that is damaged, or contains more than plain values."""


@dataclass(frozen=True)
class Global:
    """Global that a pickle names. The name is not looked up."""

    name: str  # "module.name"


_MEMBER = Global(_MEMBER_OF[0])  # compared by identity on the stack


class RecordedCall:
    """Result of a call in a pickle, recorded instead of executed.

    Args:
        name: Called global, as "module.name".
        args: Arguments of the call.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None  # state that the pickle would set on the instance

    def __repr__(self) -> str:
        return f"<{self.name}>"


Members = Mapping[str, Container[str]]  # names of the members, by class name of the enumeration


def load(
    data: bytes,
    allowed: Container[str],
    *,
    persistent_ids: bool = False,
    enumerations: Members | None = None,
) -> object:
    """Return the value of a pickle: None, bool, int, float, str, bytes, tuple, list, dict, `Global` or `RecordedCall`.

    A tuple, list, dictionary or `RecordedCall` may contain another value several times, and itself.

    Args:
        data: The whole pickle.
        allowed: Names that the pickle may use.
        persistent_ids: Whether the pickle may refer to values stored elsewhere, as torch's do to the bytes of tensors.
        enumerations: Classes, which must be allowed too, whose members may be given by name: `RecordedCall` with that
            name.

    Raises:
        PlainPickleError: The data is not a pickle, is cut off, uses a name that is not allowed, or an unknown
            instruction.
    """
    machine = _Machine(data, allowed, persistent_ids, enumerations or {})
    try:
        return machine.run()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise PlainPickleError(f"it is not a complete pickle, {machine.place}") from error


class _Machine:
    """State of the stack machine: bytes, position, stack, positions of the marks on it, and memo."""

    def __init__(self, data: bytes, allowed: Container[str], persistent_ids: bool, enumerations: Members) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.allowed = allowed
        self.persistent_ids = persistent_ids
        self.enumerations = enumerations

    @property
    def place(self) -> str:
        return f"byte {self.at} of {len(self.data)}"

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        for _ in range(MAX_INSTRUCTIONS):
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.pop()
            step = steps[code]
            if step is None:
                raise PlainPickleError(f"it has instruction 0x{code:02x} at {self.place}, which is not read")
            step(self)
        raise PlainPickleError(f"it has more than {MAX_INSTRUCTIONS} instructions")

    def take(self, count: int) -> bytes:
        start, end = self.at, self.at + count
        if end > len(self.data):
            raise PlainPickleError(f"it is cut off, {self.place}")
        self.at = end
        return self.data[start:end]

    def number(self, form: struct.Struct) -> int:
        value = form.unpack_from(self.data, self.at)[0]
        self.at += form.size
        return value

    def pop(self) -> Any:
        """Pop the top of the stack, which must be above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise PlainPickleError(f"its stack is empty, {self.place}")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def below(self, kind: type) -> Any:
        """Return the top of the stack without popping it."""
        value = self.stack[-1]
        if type(value) is not kind:
            raise PlainPickleError(f"it expects a {kind.__name__} and has another object, {self.place}")
        return value

    def named(self, module: str, name: str) -> Global:
        full = f"{module}.{name}"
        if full in _MEMBER_OF and self.enumerations:
            return _MEMBER
        if len(full) > _LONGEST_NAME or full not in self.allowed:
            raise PlainPickleError(f"it names {full[:200]!r}, which is not allowed in a checkpoint")
        return Global(full)

    def call(self) -> None:
        """Execute a call; `getattr` is accepted only for a known member of an enumeration."""
        if len(self.stack) < 2 or self.stack[-2] is not _MEMBER:
            self.make()
            return
        args, _ = self.pop(), self.pop()
        kind, member = args if type(args) is tuple and len(args) == 2 else (None, None)
        if type(kind) is Global and type(member) is str and member in self.enumerations.get(kind.name, ()):
            self.stack.append(RecordedCall(kind.name, (member,)))
        else:
            raise PlainPickleError(f"it reads an attribute of an enumeration that checkpoints do not use, {self.place}")

    def make(self) -> None:
        args, called = self.pop(), self.pop()
        if type(called) is not Global or type(args) is not tuple or called is _MEMBER:
            raise PlainPickleError(f"it calls an object without a name, {self.place}")
        empty = called.name in EMPTY_DICTIONARIES and not args
        self.stack.append({} if empty else RecordedCall(called.name, args))

    def build(self) -> None:
        state = self.pop()
        made = self.stack[-1]
        if type(made) is not RecordedCall or made.state is not None:
            raise PlainPickleError(f"it sets attributes of a {type(made).__name__}, {self.place}")
        made.state = state

    def set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise PlainPickleError(f"it has a key without a value, {self.place}")
        keys = items[::2]
        for key in keys:
            if type(key) is not RecordedCall and type(key) not in _KEY_TYPES:  # hashing a tuple can take forever
                raise PlainPickleError(f"it has a key of type {type(key).__name__}, {self.place}")
        self.below(dict).update(zip(keys, items[1::2], strict=True))

    def persistent(self) -> None:
        if not self.persistent_ids:
            raise PlainPickleError(f"it refers to external storage, {self.place}")
        self.stack.append(RecordedCall(PERSISTENT_ID, (self.pop(),)))


Step = Callable[[_Machine], object]
_STOP = ord(".")
_BYTE, _SHORT, _INT, _UINT, _LONG, _DOUBLE = map(struct.Struct, ("<B", "<H", "<i", "<I", "<Q", ">d"))


def _constant(value: Any) -> Step:
    return lambda m: m.stack.append(value)


def _number(form: struct.Struct) -> Step:
    return lambda m: m.stack.append(m.number(form))


def _empty(kind: type) -> Step:
    return lambda m: m.stack.append(kind())


def _text(length: struct.Struct) -> Step:
    return lambda m: m.stack.append(m.take(m.number(length)).decode("utf-8", "surrogatepass"))


def _bytes(length: struct.Struct) -> Step:
    return lambda m: m.stack.append(m.take(m.number(length)))


def _tuple_of(count: int) -> Step:
    def step(m: _Machine) -> None:
        items = [m.pop() for _ in range(count)]
        m.stack.append(tuple(reversed(items)))

    return step


def _put(index: struct.Struct | None) -> Step:
    """Memoize the top of the stack, under the number that follows in the data or the next free one."""

    def step(m: _Machine) -> None:
        m.memo[len(m.memo) if index is None else m.number(index)] = m.stack[-1]

    return step


def _get(index: struct.Struct) -> Step:
    return lambda m: m.stack.append(m.memo[m.number(index)])


def _integer(m: _Machine) -> None:
    count = m.number(_BYTE)
    if count > _WHOLE_NUMBER_BYTES:
        raise PlainPickleError(f"it has a whole number of {count} bytes, {m.place}")
    m.stack.append(int.from_bytes(m.take(count), "little", signed=True))


def _global(m: _Machine) -> None:
    """Read a global name: two lines of text."""
    names = []
    for _ in range(2):
        end = m.data.find(b"\n", m.at, m.at + _LONGEST_NAME)
        if end < 0:
            raise PlainPickleError(f"it has a name without an end, {m.place}")
        names.append(m.take(end - m.at).decode("utf-8"))
        m.at += 1
    m.stack.append(m.named(*names))


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if type(name) is not str or type(module) is not str:
        raise PlainPickleError(f"it has a name that is not a text, {m.place}")
    m.stack.append(m.named(module, name))


def _append(m: _Machine) -> None:
    item = m.pop()
    m.below(list).append(item)


def _appends(m: _Machine) -> None:
    items = m.pop_to_mark()
    m.below(list).extend(items)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items([key, value])


# Step of each instruction, as the standard library's `pickletools` describes them.
_KNOWN: dict[bytes, Step] = {
    b"\x80": lambda m: m.take(1) and None,  # protocol
    b"\x95": lambda m: m.take(8) and None,  # frame: how much could be read at once
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"0": lambda m: m.pop() and None,
    b"1": lambda m: m.pop_to_mark() and None,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": _number(_BYTE),
    b"M": _number(_SHORT),
    b"J": _number(_INT),
    b"\x8a": _integer,
    b"G": _number(_DOUBLE),
    b"X": _text(_UINT),
    b"\x8c": _text(_BYTE),
    b"\x8d": _text(_LONG),
    b"B": _bytes(_UINT),
    b"C": _bytes(_BYTE),
    b"\x8e": _bytes(_LONG),
    b")": _constant(()),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": lambda m: m.stack.append(tuple(m.pop_to_mark())),
    b"]": _empty(list),
    b"a": _append,
    b"e": _appends,
    b"}": _empty(dict),
    b"s": _set_item,
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"q": _put(_BYTE),
    b"r": _put(_UINT),
    b"\x94": _put(None),
    b"h": _get(_BYTE),
    b"j": _get(_UINT),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _Machine.call,
    b"\x81": _Machine.make,  # class without its constructor: handled the same here
    b"b": _Machine.build,
    b"Q": _Machine.persistent,
}
_STEPS: list[Step | None] = [_KNOWN.get(bytes((code,))) for code in range(256)]
