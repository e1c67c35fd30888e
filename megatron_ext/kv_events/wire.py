"""Wire format of KV events: vLLM's format for blocks, and events of this package for states of recurrent layers.

A batch is a msgpack array `[timestamp, events, data_parallel_rank]`, an event a map with its name under `type`. Readers
ignore unknown keys, and keys with default values are omitted. The format of older versions, an array with the name
first, is read too. `decode` checks everything that a publisher can say; see `config/fleet_limits.py` for the bounds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgpack

from megatron_ext.config.fleet_limits import (
    BATCH_BYTES,
    MAX_BATCH_EVENTS,
    MAX_BLOCK_TOKENS,
    MAX_EVENT_BLOCKS,
    MAX_EXTRA_KEYS,
    MAX_HASH_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_RANK,
    MAX_SEQUENCE,
)
from megatron_ext.kv_events.events import (
    DISK,
    AllBlocksCleared,
    AllStatesCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    StateRemoved,
    StateStored,
)
from megatron_ext.prefix_cache.hash_chain import packed_tokens

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
_CLEARED: dict[str, type[AllBlocksCleared | AllStatesCleared]] = {
    "AllBlocksCleared": AllBlocksCleared,
    "AllStatesCleared": AllStatesCleared,
}


class WireError(ValueError):
    """Error of bytes that are not a valid message of events."""


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


def encode_batches(timestamp: float, events: Iterable[Event], data_parallel_rank: int) -> Iterator[bytes]:
    """Encode events as batches of bounded size, each event separately so that other threads can run in between."""
    packer = msgpack.Packer()
    packed: list[bytes] = []
    size = 0
    for event in events:
        one = packer.pack(_map_of(event))
        if packed and size + len(one) > BATCH_BYTES:
            yield _batch(timestamp, packed, data_parallel_rank)
            packed, size = [], 0
        packed.append(one)
        size += len(one)
    if packed:
        yield _batch(timestamp, packed, data_parallel_rank)


def _batch(timestamp: float, packed: Sequence[bytes], data_parallel_rank: int) -> bytes:
    packer = msgpack.Packer()
    head = [packer.pack_array_header(3), packer.pack(timestamp), packer.pack_array_header(len(packed))]
    return b"".join([*head, *packed, packer.pack(data_parallel_rank)])


def _map_of(event: Event) -> dict[str, object]:
    name = type(event).__name__
    if isinstance(event, AllBlocksCleared | AllStatesCleared):
        return {"type": name}
    if not isinstance(event, BlockStored):
        return {"type": name, "block_hashes": event.hashes, "medium": event.medium}
    stored = {
        "type": name,
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": list(event.tokens),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": event.medium,
        "lora_name": None,
    }
    return stored if event.extra_keys is None else {**stored, "extra_keys": event.extra_keys}


def decode_sequence(frame: bytes) -> int:
    """Decode the number of a message.

    Raises:
        WireError: It is not the number of a message.
    """
    number = int.from_bytes(frame, "big") if len(frame) == SEQUENCE_BYTES else None
    if number is None or number > MAX_SEQUENCE:
        raise WireError(f"not the number of a message: {len(frame)} bytes, {number}")
    return number


def decode(payload: bytes) -> EventBatch:
    """Decode a batch; events with unknown names, and those of blocks and states on disk, are left out.

    Raises:
        WireError: The bytes are not a batch of events, or exceed a bound.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise WireError(f"a batch of {len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        batch = _list(msgpack.unpackb(payload, strict_map_key=False))
        timestamp, maps = float(batch[0]), _list(batch[1])  # type: ignore[arg-type]  # raises for other types
        rank = batch[2] if len(batch) > 2 else None
        if len(maps) > MAX_BATCH_EVENTS:
            raise ValueError(f"{len(maps)} events; at most {MAX_BATCH_EVENTS} are read")
        if rank is not None and (type(rank) is not int or not 0 <= rank < MAX_RANK):
            raise ValueError(f"the data-parallel rank is {str(rank)[:40]}")
        events = [_event(_fields_of(one)) for one in maps]
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise WireError(f"no batch of KV events: {type(error).__name__}: {str(error)[:200]}") from None
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
    if fields.get("medium") == DISK:  # the router counts what can be skipped at once
        return None
    if name == "BlockStored":
        return _stored(fields)
    if name in _WITH_HASHES:
        return _WITH_HASHES[str(name)](_hashes(fields["block_hashes"]))
    return _CLEARED[str(name)]() if name in _CLEARED else None


def _stored(fields: Mapping[object, object]) -> BlockStored:
    hashes, size, tokens = _hashes(fields["block_hashes"]), fields["block_size"], _list(fields["token_ids"])
    if type(size) is not int or not 1 <= size <= MAX_BLOCK_TOKENS:
        raise ValueError(f"the block size is {str(size)[:40]}; blocks have 1 to {MAX_BLOCK_TOKENS} tokens")
    if len(tokens) != len(hashes) * size:
        raise ValueError(f"{len(hashes)} blocks of {size} tokens come with {len(tokens)} token ids")
    parent, extra = fields.get("parent_block_hash"), fields.get("extra_keys")
    return BlockStored(
        hashes,
        None if parent is None else _hash(parent),
        packed_tokens(tokens),  # type: ignore[arg-type]  # checks each id
        size,
        None if extra is None else [_extra_keys(one) for one in _list(extra, len(hashes))],
    )


def _list(value: object, length: int | None = None) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"a list is missing: {type(value).__name__}")
    if length is not None and len(value) != length:
        raise ValueError(f"a list of {len(value)} in place of {length}")
    return value


def _hash(value: object) -> Hash:
    if type(value) is not int and not isinstance(value, bytes):
        raise TypeError(f"a hash is an integer or bytes, not {type(value).__name__}")
    if isinstance(value, bytes) and len(value) > MAX_HASH_BYTES:
        raise ValueError(f"a hash of {len(value)} bytes; at most {MAX_HASH_BYTES} are read")
    return value


def _hashes(value: object) -> list[Hash]:
    hashes = _list(value)
    if len(hashes) > MAX_EVENT_BLOCKS:
        raise ValueError(f"an event of {len(hashes)} blocks; at most {MAX_EVENT_BLOCKS} are read")
    return [_hash(one) for one in hashes]


def _extra_keys(value: object) -> list[Hashable] | None:
    """Return the extra keys of a block: None, or a short list of plain values."""
    if value is None:
        return None
    keys = _list(value)
    if len(keys) > MAX_EXTRA_KEYS or not all(one is None or isinstance(one, str | bytes | int | float) for one in keys):
        raise ValueError(f"the extra keys of a block are up to {MAX_EXTRA_KEYS} plain values")
    return keys
