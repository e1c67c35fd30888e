"""Batches of events as bytes, ours and those of others."""

from __future__ import annotations

import msgpack
import pytest

from megatron_ext.config.fleet_limits import (
    MAX_BATCH_EVENTS,
    MAX_BLOCK_TOKENS,
    MAX_EVENT_BLOCKS,
    MAX_EXTRA_KEYS,
    MAX_HASH_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_RANK,
)
from megatron_ext.kv_events.changes import Block, Delta
from megatron_ext.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, StateRemoved, StateStored
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.kv_events.wire import END_OF_REPLAY, WireError, decode, decode_sequence, encode_batches
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from tests.unit_tests.support.kv_events import encoded

STORED = BlockStored([2**64 - 1, 7], None, packed_tokens([1, 2, 3, 4]), 2, [["salt"], None])
STORED_MAP = {"type": "BlockStored", "block_hashes": [1], "token_ids": [5, 6], "block_size": 2}
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


def test_round_trip():
    batch = decode(encoded([*EVENTS, StateRemoved([7])], 1))
    assert (batch.timestamp, batch.data_parallel_rank) == (1.5, 1)
    assert list(batch.events) == [*EVENTS, StateRemoved([7])]


def test_events_as_arrays_and_unknown_ones():
    """Older versions of vLLM put the name first; unknown names are left out."""
    events = [["BlockStored", [1], None, [5, 6], 2, None, "GPU", None], ["AllBlocksCleared"], {"type": "New", "x": 1}]
    batch = decode(msgpack.packb([1.0, events]))
    assert list(batch.events) == [BlockStored([1], None, packed_tokens([5, 6]), 2), AllBlocksCleared()]
    assert batch.data_parallel_rank is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb([1.0]),
        msgpack.packb([1.0, 5]),
        msgpack.packb([1.0, [{"type": "BlockStored"}]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [[1]]}]]),
        msgpack.packb([1.0, [["BlockStored", [1], bytes(MAX_HASH_BYTES + 1), [1], 1]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, ["x"], 1]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [-1], 1]]]),
        msgpack.packb([1.0, [[]]]),
        msgpack.packb([1.0, [5]]),
        msgpack.packb([1.0, [], "x"]),
        msgpack.packb([1.0, [], True]),
        msgpack.packb([1.0, [], MAX_RANK]),
        msgpack.packb({"ts": 1.0, "events": []}),
        msgpack.packb([10**19, [{"type": "BlockRemoved", "block_hashes": [True]}]]),
        msgpack.packb([1.0, [STORED_MAP | {"block_size": 0}]]),
        msgpack.packb([1.0, [STORED_MAP | {"block_size": 2**64 - 1}]]),
        msgpack.packb([1.0, [STORED_MAP | {"token_ids": [1]}]]),
        msgpack.packb([1.0, [STORED_MAP | {"extra_keys": []}]]),
        msgpack.packb([1.0, [STORED_MAP | {"extra_keys": [[[1]]]}]]),
        msgpack.packb([1.0, [STORED_MAP | {"extra_keys": [{"a": 1}]}]]),
        b"\x91" * 200_000 + b"\xc0",
        encoded(EVENTS)[:-3],
        encoded(EVENTS) + b"x",
    ],
)
def test_other_bytes_are_refused(payload):
    with pytest.raises(WireError):
        decode(payload)


def removed(count: int) -> bytes:
    return encoded([BlockRemoved(list(range(count)))], 0)


def unknown(count: int) -> bytes:
    return msgpack.packb([1.0, [{"type": "New", "x": bytes(count)}]])


OVERHEAD = len(unknown(2**16)) - 2**16  # bytes


@pytest.mark.parametrize(
    ("build", "most"),
    [
        (removed, MAX_EVENT_BLOCKS),
        (lambda count: encoded([AllBlocksCleared()] * count, 0), MAX_BATCH_EVENTS),
        (lambda count: encoded([BlockStored([1], None, packed_tokens([0] * count), count)], 0), MAX_BLOCK_TOKENS),
        (
            lambda count: encoded([BlockStored([1], None, packed_tokens([0]), 1, [["x"] * count])], 0),
            MAX_EXTRA_KEYS,
        ),
        (lambda count: encoded([BlockRemoved([bytes(count)])], 0), MAX_HASH_BYTES),
        (unknown, MAX_MESSAGE_BYTES - OVERHEAD),
    ],
    ids=["blocks of an event", "events", "tokens of a block", "extra keys", "bytes of a hash", "bytes"],
)
def test_bounds(build, most):
    """Messages at a bound are read, and those above it are refused."""
    decode(build(most))
    with pytest.raises(WireError):
        decode(build(most + 1))


def test_published_messages_are_within_the_bounds():
    """Large changes of a cache are split into events and messages that every reader accepts."""
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
            assert [event for batch in batches for event in decode(batch).events] == events


def test_numbers_of_messages():
    assert decode_sequence((2**63 - 1).to_bytes(8, "big")) == 2**63 - 1
    for frame in (END_OF_REPLAY, (2**63).to_bytes(8, "big"), bytes(7), bytes(9), b""):
        with pytest.raises(WireError, match="not the number of a message"):
            decode_sequence(frame)
