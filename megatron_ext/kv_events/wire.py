"""Wire format of KV events: vLLM's format, with two additional events for the states of recurrent layers.

A batch is a msgpack array `[timestamp, events, data_parallel_rank]`, an event a map with its name under `type`. Readers
ignore unknown keys, and keys with default values are omitted. The format of older versions, an array with the name
first, is read too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgpack

from megatron_ext.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StateRemoved,
    StateStored,
)
from megatron_ext.prefix_cache.hash_chain import packed_tokens

MEDIUM = "GPU"  # the first tier of KV on any device; routers use it as a weight
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                  "extra_keys")  # fmt: skip
_HASHES_FIELDS = ("block_hashes", "medium")
_WITH_HASHES: dict[str, type[BlockRemoved | StateStored | StateRemoved]] = {
    "BlockRemoved": BlockRemoved,
    "StateStored": StateStored,
    "StateRemoved": StateRemoved,
}


class WireError(ValueError):
    """Error of bytes that are not a batch of events."""


@dataclass(frozen=True)
class EventBatch:
    """Batch of events, in order.

    Attributes:
        timestamp: Seconds since 1970, by the publisher's clock.
        events: Events with known names.
        data_parallel_rank: Rank of the replica in its world; None if the batch does not contain it.
    """

    timestamp: float
    events: Sequence[Event]
    data_parallel_rank: int | None


def encode(timestamp: float, events: Iterable[Event], data_parallel_rank: int) -> bytes:
    """Encode a batch, each event separately so that other threads can run in between."""
    packer = msgpack.Packer()
    packed = [packer.pack(_map_of(event)) for event in events]
    head = [packer.pack_array_header(3), packer.pack(timestamp), packer.pack_array_header(len(packed))]
    return b"".join([*head, *packed, packer.pack(data_parallel_rank)])


def _map_of(event: Event) -> dict[str, object]:
    name = type(event).__name__
    if isinstance(event, AllBlocksCleared):
        return {"type": name}
    if not isinstance(event, BlockStored):
        return {"type": name, "block_hashes": event.hashes, "medium": MEDIUM}
    stored = {
        "type": name,
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": list(event.tokens),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }
    return stored if event.extra_keys is None else {**stored, "extra_keys": event.extra_keys}


def decode(payload: bytes) -> EventBatch:
    """Decode a batch; events with unknown names are left out.

    Raises:
        WireError: The bytes are not a batch of events.
    """
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
        timestamp, events = float(batch[0]), [_event(_fields_of(one)) for one in batch[1]]
        rank = batch[2] if len(batch) > 2 else None
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"no batch of KV events: {error!r}") from None
    if rank is not None and not isinstance(rank, int):
        raise WireError(f"no batch of KV events: the data-parallel rank is {rank!r}")
    return EventBatch(timestamp, [event for event in events if event is not None], rank)


def _fields_of(event: object) -> Mapping[object, object]:
    """Return an event's fields by name, including `type`."""
    if isinstance(event, dict):
        return event
    if not isinstance(event, list):
        raise TypeError(f"an event is a map or an array, not {type(event).__name__}")
    names = _STORED_FIELDS if event[0] == "BlockStored" else _HASHES_FIELDS
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _event(fields: Mapping[object, object]) -> Event | None:
    name = fields["type"]
    if name == "BlockStored":
        return BlockStored(
            _hashes(fields["block_hashes"]),
            _hash(fields.get("parent_block_hash")),
            _tokens(fields["token_ids"]),
            _size(fields["block_size"]),
            None if fields.get("extra_keys") is None else _list(fields["extra_keys"]),
        )
    if name in _WITH_HASHES:
        return _WITH_HASHES[str(name)](_hashes(fields["block_hashes"]))
    return AllBlocksCleared() if name == "AllBlocksCleared" else None


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a list is missing: {type(value).__name__}")
    return value


def _tokens(value: object) -> Sequence[int]:
    """Return packed token ids; packing checks each id."""
    return packed_tokens(_list(value))  # type: ignore[arg-type]  # raises for non-integers


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"block size {value!r}")
    return value


def _hash(value: object) -> Hashable | None:
    if value is not None and not isinstance(value, int | bytes):
        raise TypeError(f"a hash is an integer or bytes, not {type(value).__name__}")
    return value


def _hashes(value: object) -> list[Hashable]:
    hashes = [_hash(one) for one in _list(value)]
    if None in hashes:
        raise TypeError("a hash is missing")
    return hashes
