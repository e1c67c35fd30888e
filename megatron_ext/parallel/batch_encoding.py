"""Batch encoding: a head of fixed size, which holds all commands but new requests, and a body for the rest.

A broadcast has a size that all ranks know beforehand, so an unannounced message must have a constant size. The head is
a few bytes, with room for one small command such as an abort. More commands, and new requests with their prompts, come
in a second message, whose length is in the head.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence

from megatron_ext.parallel.commands import (
    Action,
    Batch,
    Command,
    End,
    GoLive,
    KeepCache,
    Reset,
    ResetPrefixCache,
    Resume,
    Suspend,
)
from megatron_ext.scheduling.record import Status

HEAD_BYTES = 16
_HEAD = struct.Struct("<BBxxI")  # action, commands in the head, bytes of the body
_COMMAND = struct.Struct("<BBHI")  # command index, status, replica, request id
_MAX = (HEAD_BYTES - _HEAD.size) // _COMMAND.size  # commands in a head: one
_SMALL: tuple[type[Command], ...] = (End, ResetPrefixCache, Suspend, Resume, Reset, GoLive, KeepCache)
_STATUSES = tuple(Status)


def pack(batch: Batch) -> tuple[bytes, bytes]:
    """Return head and body; the body is empty if all commands fit into the head."""
    small = [_pack_small(*one) for one in batch.commands] if len(batch.commands) <= _MAX else [None]
    if None not in small:
        head = _HEAD.pack(batch.action, len(small), 0) + b"".join(one for one in small if one is not None)
        return head.ljust(HEAD_BYTES, b"\0"), b""
    body = pickle.dumps(batch.commands, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(batch.action, 0, len(body)).ljust(HEAD_BYTES, b"\0"), body


def _pack_small(replica: int, command: Command) -> bytes | None:
    """Pack a command for the head; None if it does not fit there."""
    if not isinstance(command, _SMALL):
        return None
    status, name = (_STATUSES.index(command.status), command.request_id) if isinstance(command, End) else (0, 0)
    try:
        return _COMMAND.pack(_SMALL.index(type(command)), status, replica, name)
    except struct.error:  # an id of more than 32 bits
        return None


def body_length(head: bytes) -> int:
    """Return the bytes of the body that follows this head; 0 if there is no body."""
    return int(_HEAD.unpack_from(head)[2])


def unpack(head: bytes, body: bytes = b"") -> Batch:
    """Decode a packed batch. Ranks trust each other: see `Link`."""
    action, count, _ = _HEAD.unpack_from(head)
    if body:
        return Batch(Action(action), pickle.loads(body))
    fields = [_COMMAND.unpack_from(head, _HEAD.size + i * _COMMAND.size) for i in range(count)]
    return Batch(Action(action), tuple(_unpack_small(one) for one in fields))


def _unpack_small(fields: Sequence[int]) -> tuple[int, Command]:
    which, status, replica, name = fields
    kind = _SMALL[which]
    return replica, End(name, _STATUSES[status]) if kind is End else kind()  # type: ignore[call-arg]  # no fields
