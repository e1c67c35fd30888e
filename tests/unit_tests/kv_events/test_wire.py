"""RP-1: batches of events as bytes."""

from __future__ import annotations

import msgpack
import msgspec
import pytest

from megatron_ext.config.kv_events import BATCH_BYTES, EVENT_BLOCKS, EVENT_HASHES, MAX_BLOCK_TOKENS
from megatron_ext.kv_events.changes import Block, Delta
from megatron_ext.kv_events.channel import encode_batches
from megatron_ext.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, StateStored
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from tests.unit_tests.kv_events import vllm_classes
from tests.unit_tests.support.kv_events import encoded

STORED = BlockStored([2**64 - 1, 7], None, packed_tokens([1, 2, 3, 4]), 2, [["salt"], None])
EVENTS = [
    AllBlocksCleared(),
    STORED,
    BlockStored([8], 7, packed_tokens([5, 6]), 2),
    BlockRemoved([8]),
    StateStored([7]),
]


def test_bytes_are_those_of_the_format():
    """RP-1: a map for each event, its name under `type`."""
    timestamp, events, rank = msgpack.unpackb(encoded(EVENTS, 1))
    assert (timestamp, rank) == (1.5, 1)
    assert [event["type"] for event in events] == [type(event).__name__ for event in EVENTS]
    assert events[1] == {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 7],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["salt"], None],
    }
    assert events[3] == {"type": "BlockRemoved", "block_hashes": [8], "medium": "GPU"}


def test_states_are_nothing_to_clients_of_vllm():
    """RP-1: their classes decode blocks and refuse states, which have sockets of their own."""
    assert len(vllm_classes.decode(encoded(EVENTS[:4])).events) == 4
    with pytest.raises(msgspec.ValidationError):
        vllm_classes.decode(encoded(EVENTS))


def test_published_messages_are_within_the_bounds():
    """Large changes of a cache are split into events and messages of bounded size, whose events are these, in order."""
    for size, count in ((1, 5_000), (64, 5_000), (MAX_BLOCK_TOKENS, 5)):
        mirror, delta = Mirror(size, has_states=True), Delta()
        names = [number.to_bytes(32, "big") for number in range(count)]
        for number, name in enumerate(names):
            parent = names[number - 1] if number else None
            delta.stored[name] = Block(parent, packed_tokens([2**32 - 1] * size), None)
        delta.states_stored[names[-1]] = None
        told = [mirror.apply(delta), mirror.present()]
        told.append(mirror.apply(Delta(states_removed=dict.fromkeys(names[-1:]), removed=dict.fromkeys(names[::-1]))))
        for events in [one.blocks for one in told] + [one.states for one in told]:
            batches = list(encode_batches(0.0, events, 0))
            read = [msgpack.unpackb(batch)[1] for batch in batches]
            single = [one for batch in read for one in batch]
            assert [(one["type"], one.get("block_hashes")) for one in single] == [
                (type(event).__name__, getattr(event, "hashes", None)) for event in events
            ]
            assert all(len(one["block_hashes"]) <= EVENT_BLOCKS for one in single if one["type"] == "BlockStored")
            assert all(len(one.get("block_hashes", ())) <= EVENT_HASHES for one in single)
            sizes = [sum(map(len, map(msgpack.packb, held))) for held in read if len(held) > 1]
            assert all(size <= BATCH_BYTES for size in sizes)
