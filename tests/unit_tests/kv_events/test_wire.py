"""Batches of events as bytes, ours and those of others."""

from __future__ import annotations

import msgpack
import pytest

from megatron_ext.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, StateRemoved, StateStored
from megatron_ext.kv_events.wire import WireError, decode, encode
from megatron_ext.prefix_cache.hash_chain import packed_tokens

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
    timestamp, events, rank = msgpack.unpackb(encode(2.5, EVENTS, 1))
    assert (timestamp, rank) == (2.5, 1)
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


def test_what_is_written_is_read():
    batch = decode(encode(2.5, [*EVENTS, StateRemoved([7])], 1))
    assert (batch.timestamp, batch.data_parallel_rank) == (2.5, 1)
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
        msgpack.packb([1.0, [["BlockStored", [1], None, ["x"], 1]]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [-1], 1]]]),
        msgpack.packb([1.0, [[]]]),
        msgpack.packb([1.0, [5]]),
        msgpack.packb([1.0, [], "x"]),
        encode(1.0, EVENTS, 0)[:-3],
        encode(1.0, EVENTS, 0) + b"x",
    ],
)
def test_other_bytes_are_refused(payload):
    with pytest.raises(WireError):
        decode(payload)
