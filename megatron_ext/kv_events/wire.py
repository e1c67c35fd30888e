"""Wire format of KV events: vLLM's format for blocks, and events of this package for states of recurrent layers.

A batch is a msgpack array `[timestamp, events, data_parallel_rank]`, an event a map with its name under `type`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgpack

from megatron_ext.config.fleet_limits import BATCH_BYTES
from megatron_ext.kv_events.events import AllBlocksCleared, AllStatesCleared, BlockStored, Event

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


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
    stored: dict[str, object] = {
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
