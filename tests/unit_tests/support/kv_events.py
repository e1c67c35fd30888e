"""Reader of KV events written from the description of the format, without our code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgpack
import zmq

from megatron_ext.kv_events.channel import encode_batches
from megatron_ext.kv_events.events import Event
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.public_hash import event_hash
from tests.unit_tests.kv_events import vllm_classes

PATIENCE = 60.0  # seconds until a test gives up; nothing is measured
END = (2**64 - 1).to_bytes(8, "big")


@dataclass(frozen=True)
class Block:
    """Block as the events describe it."""

    parent: int | None
    tokens: tuple[int, ...]
    extra: tuple | None


@dataclass
class Reader:
    """An index that is made of events alone.

    Attributes:
        blocks: Cached blocks.
        states: Blocks after which requests can resume.
        expected: Number of the next batch of blocks.
        expected_states: Number of the next batch of states.
        ranks: Data-parallel ranks that were named.
    """

    blocks: dict[int, Block] = field(default_factory=dict)
    states: set[int] = field(default_factory=set)
    expected: int = 0
    expected_states: int = 0
    ranks: set[int] = field(default_factory=set)

    def read_blocks(self, payload: bytes) -> None:
        """Read a message of blocks, which clients with vLLM's classes can decode."""
        vllm_classes.decode(payload)
        self.read(payload)

    def read(self, payload: bytes) -> None:
        """`[timestamp, events, data_parallel_rank]`, an event a map."""
        timestamp, events, rank = msgpack.unpackb(payload)
        assert isinstance(timestamp, float)
        self.ranks.add(rank)
        for event in events:
            getattr(self, f"_{event.pop('type')}")(**event)

    def _BlockStored(  # noqa: N802  # the names of the format
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None,
        extra_keys: list | None = None,
    ) -> None:
        assert (medium, lora_id, lora_name) == ("GPU", None, None)
        assert block_hashes
        assert len(token_ids) == len(block_hashes) * block_size
        assert parent_block_hash is None or parent_block_hash in self.blocks, "a block without its parent"
        assert extra_keys is None or len(extra_keys) == len(block_hashes)
        parent = parent_block_hash
        for i, one in enumerate(block_hashes):
            assert 0 <= one < 2**64
            assert one not in self.blocks, "told twice"
            extra = None if extra_keys is None or extra_keys[i] is None else tuple(extra_keys[i])
            self.blocks[one] = Block(parent, tuple(token_ids[i * block_size : (i + 1) * block_size]), extra)
            parent = one

    def _BlockRemoved(self, block_hashes: list[int], medium: str) -> None:  # noqa: N802
        for one in block_hashes:
            assert all(block.parent != one for block in self.blocks.values()), "it goes before those that continue it"
            del self.blocks[one]

    def _AllBlocksCleared(self) -> None:  # noqa: N802
        self.blocks.clear()

    def _AllStatesCleared(self) -> None:  # noqa: N802
        self.states.clear()

    def _StateStored(self, block_hashes: list[int], medium: str) -> None:  # noqa: N802
        assert self.states.isdisjoint(block_hashes)
        self.states |= set(block_hashes)

    def _StateRemoved(self, block_hashes: list[int], medium: str) -> None:  # noqa: N802
        assert self.states >= set(block_hashes)
        self.states -= set(block_hashes)

    def take(self, frames: Iterable[bytes], topic: bytes = b"kv-events") -> bool:
        """Take one message of blocks and return whether it was the expected one; others are left out."""
        name, number, payload = frames
        assert name == topic
        assert len(number) == 8
        if int.from_bytes(number, "big") != self.expected:
            return False
        self.read_blocks(payload)
        self.expected += 1
        return True

    def take_states(self, number: int, payload: bytes) -> None:
        """Take the next message of states."""
        assert number == self.expected_states
        self.read(payload)
        self.expected_states += 1

    def assert_sound(self) -> None:
        """Snapshots stand at the ends of blocks that are there, and parents are there."""
        assert self.states <= self.blocks.keys()
        assert all(block.parent is None or block.parent in self.blocks for block in self.blocks.values())


def encoded(events: Sequence[Event], rank: int = 0) -> bytes:
    """Return the one message that these events fit into."""
    (batch,) = encode_batches(1.5, events, rank)
    return batch


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.002)


def asker_of(endpoint: str) -> zmq.Socket:
    """A socket that asks for replays."""
    one = zmq.Context.instance().socket(zmq.DEALER)
    one.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))
    one.setsockopt(zmq.LINGER, 0)
    one.connect(endpoint)
    return one


def replayed(asker: zmq.Socket, start: int) -> list[tuple[int, bytes]]:
    asker.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    while (frames := asker.recv_multipart())[1] != END:
        batches.append((int.from_bytes(frames[1], "big"), frames[2]))
    assert frames == [b"", END, b""]
    return batches


class Worker:
    """A reader that asks again and again for what it has not got.

    Args:
        publisher: Publisher that replays events.
        cache: Cache of the events.
    """

    def __init__(self, publisher: Publisher, cache: PrefixCache) -> None:
        self.asker, self.cache, self.reader = asker_of(publisher.blocks.replay_endpoint), cache, Reader()
        self.states_asker = None if publisher.states is None else asker_of(publisher.states.replay_endpoint)

    def has_all(self) -> bool:
        """Return whether the reader knows, after a replay, all that the cache holds (hybrids: its snapshots)."""
        reader = self.reader
        for number, payload in replayed(self.asker, reader.expected):
            assert reader.take([b"kv-events", number.to_bytes(8, "big"), payload])
        if self.states_asker is not None:
            for number, payload in replayed(self.states_asker, reader.expected_states):
                reader.take_states(number, payload)
        if self.cache.states is None:
            return reader.blocks.keys() == {event_hash(one) for one in self.cache.index.block_hashes()}
        states = {event_hash(one) for one in self.cache.states._visible}
        return reader.states == states and states <= reader.blocks.keys()
