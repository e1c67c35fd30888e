"""Events over sockets: numbers, replays, and readers that do not read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgpack
import pytest
import zmq

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.kv_events import MAX_REQUEST_BYTES, KvEventsConfig
from megatron_ext.errors import ConfigError
from megatron_ext.kv_events import channel
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.prefix_cache.public_hash import event_hash
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from tests.unit_tests.scheduling.builders import make_limits, make_request
from tests.unit_tests.support.kv_events import PATIENCE, Reader, Worker, asker_of, replayed, until

MANY = 500  # batches, far more than sockets with `SmallBuffers` hold
HOST = "tcp://127.0.0.1:0"


class SmallBuffers(zmq.Context):
    """A context whose sockets get few bytes from the kernel, which otherwise takes megabytes on some machines."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.setsockopt(zmq.SNDBUF, 4096)


class World:
    """A scheduler whose cache is published, and a reader of it."""

    def __init__(self, buffer_steps: int = 10_000, slots: int | None = None) -> None:
        config = KvEventsConfig(HOST, "kv-events", HOST, buffer_steps, HOST, HOST)
        self.scheduler = Scheduler(make_limits(), EvictionPolicyName.LRU, b"model", slots)
        self.publisher = Publisher(config)
        self.scheduler.cache.observers = [self.publisher.changes]
        self.context = zmq.Context()
        self.arrivals = 0

    def start(self) -> None:
        states = self.scheduler.cache.states is not None
        self.publisher.start(Mirror(self.scheduler.limits.block_size, has_states=states))

    def close(self) -> None:
        self.publisher.close()
        self.context.destroy(linger=0)

    def subscriber(self, unread: int = 1000) -> zmq.Socket:
        one = self.context.socket(zmq.SUB)
        one.setsockopt(zmq.RCVHWM, unread)
        one.setsockopt(zmq.RCVBUF, 4096)
        one.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))
        one.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        one.connect(self.publisher.blocks.endpoint)
        return one

    def asker(self) -> zmq.Socket:
        return asker_of(self.publisher.blocks.replay_endpoint)

    def request(self) -> None:
        """Serve one request from start to end; with others it fills the cache and evicts."""
        request = make_request(self.arrivals, 9, num_tokens_to_generate=1)
        self.arrivals += 1
        self.scheduler.add(request)
        plan = self.scheduler.schedule()
        step = describe_step(plan.chunks, self.scheduler.limits.block_size)
        assert len(self.scheduler.commit(step, {request.request_id: 5})) == 1

    def cached(self) -> set[int]:
        return {event_hash(block_hash) for block_hash in self.scheduler.cache.index.block_hashes()}


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Make worlds, closed after the test, failed or not: a context with open sockets blocks its collection."""
    worlds: list[World] = []

    def make(**settings: object) -> World:
        worlds.append(World(**settings))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()


@pytest.fixture
def world(request, make_world) -> World:
    made = make_world(**getattr(request, "param", {}))
    made.start()
    return made


@pytest.mark.parametrize("world", [{}, {"slots": 2}], ids=["attention", "hybrid"], indirect=True)
def test_events_are_numbered_and_replayed(world):
    """RP-1: events of each socket have numbers from 0 on, without a gap; missed events can be requested."""
    follower = Worker(world.publisher, world.scheduler.cache)
    until(lambda: follower.has_all() and follower.reader.expected == 1)  # that nothing is cached
    for _ in range(6):
        world.request()
        until(follower.has_all)
        follower.reader.assert_sound()
    assert follower.reader.blocks
    assert replayed(follower.asker, follower.reader.expected) == [], "nothing is missing"


def test_a_subscriber_receives_what_is_replayed(world):
    """RP-1: under the topic, each message once and in order."""
    subscriber, follower = world.subscriber(), Worker(world.publisher, world.scheduler.cache)
    while not subscriber.poll(20):  # its subscription takes a while to arrive
        world.request()
    for _ in range(3):
        world.request()
        until(follower.has_all)
    batches, received = replayed(world.asker(), 0), []
    while not received or received[-1][0] < batches[-1][0]:
        topic, number, payload = subscriber.recv_multipart()
        received.append((int.from_bytes(number, "big"), payload))
        assert topic == b"kv-events"
    assert received == batches[received[0][0] :]


@pytest.mark.parametrize("world", [{"buffer_steps": 3, "slots": 3}], indirect=True)
@pytest.mark.parametrize("start", [0, 2**40], ids=["beyond the buffer", "of an earlier life"])
def test_beyond_the_buffer_comes_the_present_index(world, start):
    """RP-1: a clear event and the current contents are sent; the number is the last one. On both sockets."""
    asker, reader = world.asker(), Reader()
    states_asker = asker_of(world.publisher.states.replay_endpoint)
    for _ in range(12):
        world.request()
        replayed(asker, 2**40)  # so that each has a batch of its own
    whole = {event_hash(block_hash) for block_hash in world.scheduler.cache.states._visible}

    def is_whole() -> bool:
        for one, clear in ((asker, "AllBlocksCleared"), (states_asker, "AllStatesCleared")):
            ((number, payload),) = replayed(one, start)
            assert number > 3
            assert msgpack.unpackb(payload)[1][0] == {"type": clear}
            reader.read(payload)
        return reader.states == whole

    until(is_whole)
    reader.assert_sound()
    assert reader.blocks.keys() <= world.cached()
    for one in (asker, states_asker):
        number, _ = replayed(one, start)[0]
        assert [batch for batch, _ in replayed(one, number)] == [number], "TE-6: the next batch has the next number"


def test_broken_requests_are_left_out(world, caplog):
    """RP-1: invalid requests get no reply and one line in the log, and the next valid one is answered."""
    asker = world.asker()
    for frames in ([b"x"], [b"", b""], [b"", b"123"], [b"no", bytes(8)], [b"", bytes(8), b"more"], [b"", bytes(9)]):
        asker.send_multipart(frames)
    until(lambda: len(replayed(asker, 0)) >= 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_size_of_a_request(world, caplog):
    """A frame at the bound is received, and refused as no request; a larger one ends its connection unread."""
    for size, lines in ((MAX_REQUEST_BYTES, 1), (MAX_REQUEST_BYTES + 1, 0), (2**26, 0)):
        caplog.clear()
        world.publisher.blocks._complaints.clear()
        asker = world.asker()
        asker.send_multipart([b"", bytes(size)])
        until(lambda asker=asker: asker.send_multipart([b"", bytes(8)]) or asker.poll(200))
        refused = [one for one in caplog.records if "invalid requests" in one.msg]
        assert len(refused) == lines, "lines on replays that the closed connection has cut short do not count"


def test_bytes_that_are_kept_are_bounded(world, monkeypatch):
    """Old batches are dropped for their size, too; a request for them gets the current contents."""
    monkeypatch.setattr(channel, "BUFFER_BYTES", 1000)
    asker = world.asker()
    for _ in range(20):
        world.request()
        replayed(asker, 2**40)
    until(lambda: world.publisher.blocks._kept[0][0] > 0)
    kept = list(world.publisher.blocks._kept)
    assert len(kept) == 1 or sum(len(payload) for _, payload in kept) <= 1000
    (batch,) = replayed(asker, 0)
    assert msgpack.unpackb(batch[1])[1][0] == {"type": "AllBlocksCleared"}


def test_a_stopped_subscriber_delays_no_other(monkeypatch, make_world):
    """RP-1: a stopped subscriber and a stopped asker lose batches; steps and other readers do not."""
    monkeypatch.setattr(channel, "MAX_UNREAD", 4)
    monkeypatch.setattr(zmq, "Context", SmallBuffers)
    world = make_world()
    world.start()
    stopped, lazy = world.subscriber(unread=1), world.asker()
    while not stopped.poll(20):  # its subscription takes a while to arrive
        world.request()
    while world.publisher.blocks._next < MANY:  # a thread that is late puts several steps into a batch
        before = world.publisher.blocks._next
        world.request()
        if before % 64 == 0:
            lazy.send_multipart([b"", bytes(8)])
        until(lambda before=before: world.publisher.blocks._next > before)
    follower = Worker(world.publisher, world.scheduler.cache)
    until(follower.has_all)
    numbers = []
    while stopped.poll(100):
        numbers.append(int.from_bytes(stopped.recv_multipart()[1], "big"))
    assert len(numbers) < follower.reader.expected - numbers[0], "it did read all, so nothing was tested"


def test_a_thread_that_stands_still_delays_no_step(monkeypatch, make_world):
    """RP-1: the hand-over is bounded by the cache, and its events are right afterwards."""
    world, begun, go_on = make_world(), threading.Event(), threading.Event()
    apply = Mirror.apply

    def wait_and_apply(self, delta):
        begun.set()
        assert go_on.wait(PATIENCE)
        return apply(self, delta)

    monkeypatch.setattr(Mirror, "apply", wait_and_apply)
    world.start()
    world.request()
    assert begun.wait(PATIENCE)
    for _ in range(200):
        world.request()
    waiting = world.publisher.changes._delta
    total = world.scheduler.cache.use().blocks_total
    assert waiting is not None
    assert len(waiting.stored) <= total
    assert len(waiting.removed) <= total
    go_on.set()
    until(Worker(world.publisher, world.scheduler.cache).has_all)


def test_a_thread_that_fails_ends_events_and_nothing_else(monkeypatch, caplog, make_world):
    """RP-1: the failure is logged once, steps go on, and no further events are gathered."""

    def fail(self, delta):
        raise RuntimeError("planted")

    monkeypatch.setattr(Mirror, "apply", fail)
    world = make_world()
    world.start()
    world.request()
    until(lambda: not world.publisher._thread.is_alive())
    assert "KV events are off" in caplog.text
    for _ in range(5):
        world.request()
    world.scheduler.reset_prefix_cache()
    assert world.publisher.changes.take() is None
    world.scheduler.check()


def test_an_address_that_is_taken(make_world):
    """RP-1: known before anything is loaded."""
    world = make_world()
    taken = KvEventsConfig(world.publisher.blocks.endpoint)
    with pytest.raises(ConfigError, match=r"--kv-events-endpoint.*cannot be used"):
        Publisher(taken)


class TestSocketFiles:
    """SE-8: events over a path in place of a port."""

    def test_a_file_is_not_replaced(self, short_path):
        file = short_path / "events"
        file.write_text("precious")
        with pytest.raises(ConfigError, match="exists and is not a socket; give another path"):
            Publisher(KvEventsConfig(f"ipc://{file}"))
        assert file.read_text() == "precious"

    def test_a_socket_in_use_is_not_replaced_and_one_of_a_dead_process_is(self, short_path):
        config = KvEventsConfig(f"ipc://{short_path}/events")
        first = Publisher(config)
        with pytest.raises(ConfigError, match="is in use by another process"):
            Publisher(config)
        first.close()
        assert (short_path / "events").is_socket(), "libzmq leaves it"
        Publisher(config).close()
