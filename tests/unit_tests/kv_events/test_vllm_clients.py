"""RP-1: clients with vLLM's message classes decode everything that the sockets of blocks send."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.kv_events import channel
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.prefix_cache.public_hash import event_hash, event_salt
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.kv_events import vllm_classes as vllm
from tests.unit_tests.scheduling.builders import make_limits, request_of, step
from tests.unit_tests.support.kv_events import PATIENCE, asker_of, replayed, until

HOST = "tcp://127.0.0.1:0"
KEPT = 6  # batches
KNOWN = {
    (kind.__name__, name)
    for kind in (vllm.BlockStored, vllm.BlockRemoved, vllm.AllBlocksCleared)
    for name in ("type", *kind.__struct_fields__)
}


class Client:
    """Index that is made with vLLM's classes alone, from a subscription to a prefix and from replays."""

    def __init__(self, publisher: Publisher, prefix: bytes) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))
        self.events.setsockopt(zmq.SUBSCRIBE, prefix)
        self.events.connect(publisher.blocks.endpoint)
        self.asker = asker_of(publisher.blocks.replay_endpoint)
        self.blocks: dict[int, vllm.BlockStored] = {}
        self.next = 0
        self.kinds: set[str] = set()
        self.salts: set[str] = set()

    def close(self) -> None:
        self.context.destroy(linger=0)

    def read(self, payload: bytes) -> None:
        assert vllm.fields(payload) <= KNOWN
        batch = vllm.decode(payload)
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self.kinds.add(type(event).__name__)
            if isinstance(event, vllm.AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, vllm.BlockRemoved):
                for one in event.block_hashes:
                    del self.blocks[one]
            else:
                assert event.parent_block_hash is None or event.parent_block_hash in self.blocks
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                self.blocks.update(dict.fromkeys(event.block_hashes, event))
                self.salts |= {key for keys in event.extra_keys or () for key in keys or ()}

    def replay(self, start: int) -> None:
        for number, payload in replayed(self.asker, start):
            self.read(payload)
            self.next = number + 1

    def live(self) -> None:
        """Read what has arrived, and request what was lost before it."""
        while self.events.poll(20):
            _, number, payload = self.events.recv_multipart()
            if int.from_bytes(number, "big") > self.next:
                self.replay(self.next)
            if int.from_bytes(number, "big") == self.next:
                self.read(payload)
                self.next += 1


class Hybrid:
    """Scheduler of a model with recurrent layers, whose small cache is published."""

    def __init__(self) -> None:
        config = KvEventsConfig(HOST, "kv-events", HOST, KEPT, HOST, HOST)
        self.scheduler = Scheduler(make_limits(), EvictionPolicyName.LRU, b"model", 3)
        self.publisher = Publisher(config)
        self.scheduler.cache.observers = [self.publisher.changes]
        self.publisher.start(Mirror(self.scheduler.limits.block_size, has_states=True))
        self.served = 0

    def serve(self, length: int = 9, salt: str | None = None) -> None:
        """Serve a request of new tokens; several of them evict each other's blocks and snapshots."""
        first, self.served = 100 * self.served, self.served + 1
        tokens = range(first, first + length)
        self.scheduler.add(request_of(self.served, tokens, num_tokens_to_generate=1, cache_salt=salt))
        before = self.publisher.blocks._next
        assert step(self.scheduler).chunks
        until(lambda: self.publisher.blocks._next > before)  # so that messages are not merged

    def resumable(self) -> set[int]:
        return {event_hash(one) for one in self.scheduler.cache.states._visible}


@pytest.fixture
def hybrid() -> Iterator[Hybrid]:
    one = Hybrid()
    yield one
    one.publisher.close()


@pytest.fixture
def connect() -> Iterator[Callable[[Publisher, bytes], Client]]:
    """Clients, all of which are closed at the end."""
    clients: list[Client] = []

    def connected(publisher: Publisher, prefix: bytes) -> Client:
        clients.append(Client(publisher, prefix))
        return clients[-1]

    yield connected
    for one in clients:
        one.close()


@pytest.mark.parametrize("prefix", [b"", b"kv-events"], ids=["all topics", "the topic"])
def test_live_batches_and_replays_are_decoded(hybrid, connect, prefix):
    """Evictions of blocks and snapshots, a reset, gaps and replays of the current contents."""
    client = connect(hybrid.publisher, prefix)
    until(lambda: client.replay(client.next) or client.next)
    while not client.events.poll(20):  # its subscription takes a while to arrive
        hybrid.serve()
    for number in range(8):
        hybrid.serve(salt="tenant" if number % 2 else None)
        until(lambda: client.live() or hybrid.resumable() <= client.blocks.keys())
    assert client.next > KEPT
    for _ in range(2 * KEPT):
        hybrid.serve()
    late = connect(hybrid.publisher, prefix)
    late.replay(0)  # beyond the buffer: the current contents
    assert late.kinds == {"AllBlocksCleared", "BlockStored"}
    assert [vllm.decode(payload) for _, payload in replayed(late.asker, late.next - 2)]
    client.live()
    hybrid.scheduler.reset_prefix_cache()
    until(lambda: client.live() or not client.blocks)
    assert client.kinds == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
    assert client.salts == {event_salt("tenant")}


def test_states_are_on_their_own_socket(hybrid):
    """The socket of states has numbers from 0 on, and the classes refuse what it sends: the test above can fail."""
    for _ in range(2):
        hybrid.serve()
    asker = asker_of(hybrid.publisher.states.replay_endpoint)
    until(lambda: len(replayed(asker, 0)) >= 2)
    batches = replayed(asker, 0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    names = [name for _, payload in batches for name, _ in vllm.fields(payload)]
    assert set(names) == {"AllStatesCleared", "StateStored"}
    with pytest.raises(msgspec.ValidationError):
        vllm.decode(batches[-1][1])


def test_batches_are_bounded(hybrid, connect, monkeypatch):
    """Contents that exceed a batch come in several, with increasing numbers that end at the last one."""
    for _ in range(4):
        hybrid.serve(length=5)
    client = connect(hybrid.publisher, b"")
    client.replay(2**40)
    blocks = set(client.blocks)
    monkeypatch.setattr(channel, "BATCH_BYTES", 200)
    numbers = [number for number, _ in replayed(client.asker, 2**40)]
    assert len(numbers) > 2
    assert numbers == sorted(numbers)
    assert numbers[-1] == client.next - 1
    client.replay(2**40)
    assert set(client.blocks) == blocks
