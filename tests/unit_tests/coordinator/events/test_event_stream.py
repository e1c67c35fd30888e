"""RP-4, TE-6: whatever a replica publishes, its reader goes on, and knows the contents again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace

import msgpack
import pytest
import zmq
import zmq.asyncio

from megatron_ext.config.fleet_limits import MAX_EVENT_BLOCKS, MAX_MESSAGE_BYTES
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.events import event_stream
from megatron_ext.coordinator.events.event_reader import EventReader
from megatron_ext.coordinator.membership.heartbeat import EventSource
from megatron_ext.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StateStored
from megatron_ext.kv_events.wire import END_OF_REPLAY
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.routing.published_cache import PublishedCache
from megatron_ext.routing.router import Router
from tests.unit_tests.support.fleet import PATIENCE, FakeReplica, coordinator, eventually
from tests.unit_tests.support.kv_events import encoded

SIZE = 4
POOL = MAX_EVENT_BLOCKS
Frames = list[bytes]


def stored(*hashes: int, parent: int | None = None, size: int = SIZE) -> BlockStored:
    return BlockStored(list(hashes), parent, packed_tokens(range(len(hashes) * size)), size)


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def payload(*events: Event) -> bytes:
    return encoded(events)


def of_maps(*maps: object) -> bytes:
    return msgpack.packb([0.0, list(maps), 0])


class Replica:
    """Replica that publishes what a test says; its replays are by default its contents, under the last number."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self.events, self.replay = (self._context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER))
        self.events.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.source = EventSource(*(self._bound(one) for one in (self.events, self.replay)), "t")
        self.last, self.contents = 0, [stored(1, 2)]
        self.replies: Callable[[int], list[Frames]] = self.honest
        self._answering = asyncio.get_running_loop().create_task(self._answer())

    def _bound(self, one: zmq.asyncio.Socket) -> str:
        one.setsockopt(zmq.LINGER, 0)
        one.bind("tcp://127.0.0.1:0")
        return one.getsockopt_string(zmq.LAST_ENDPOINT)

    async def close(self) -> None:
        self._answering.cancel()
        await asyncio.gather(self._answering, return_exceptions=True)
        self._context.destroy(linger=0)

    def honest(self, start: int) -> list[Frames]:
        if start == self.last + 1:
            return [[END_OF_REPLAY, b""]]
        return [[number(self.last), payload(AllBlocksCleared(), *self.contents)], [END_OF_REPLAY, b""]]

    async def _answer(self) -> None:
        while True:
            client, _, start = await self.replay.recv_multipart()
            for frames in self.replies(int.from_bytes(start, "big")):
                await self.replay.send_multipart([client, b"", *frames])

    async def subscribed(self) -> None:
        """Wait for the next subscription."""
        while await asyncio.wait_for(self.events.recv(), PATIENCE) != b"\x01t":
            pass

    async def send(self, *frames: bytes) -> None:
        await self.events.send_multipart([b"t", *frames])

    async def store(self, block: int) -> None:
        """Store one more block, as a replica does."""
        event = stored(block, parent=self.contents[-1].hashes[-1])
        self.contents.append(event)
        self.last += 1
        await self.send(number(self.last), payload(event))


@contextlib.asynccontextmanager
async def reading(**changes: object) -> AsyncIterator[tuple[Router, EventReader, Replica]]:
    replica = Replica()
    for name, value in changes.items():
        setattr(replica, name, value)
    router = Router(RoutingConfig())
    router.join("r", SIZE)
    reader = EventReader(router, "r", [replica.source], SIZE, POOL)
    try:
        yield router, reader, replica
        assert not any(task.done() for task in reader._tasks)
    finally:
        reader.close()
        await replica.close()
    router.check()


def known(router: Router) -> int:
    return router.replicas()[0].blocks


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch):
    monkeypatch.setattr(event_stream, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(event_stream, "LONGEST_DELAY", 0.02)


GOOD = payload(stored(3, parent=2))
DEEP = b"\x91" * 200_000 + b"\xc0"
STORED = {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": 2, "token_ids": [1] * SIZE}
NONSENSE: dict[str, Frames] = {
    "the largest number": [number(2**64 - 1), GOOD],
    "a negative number": [number(2**63), GOOD],
    "a number far ahead": [number(2**62), GOOD],
    "a number of seven bytes": [bytes(7), GOOD],
    "two frames": [number(2)],
    "four frames": [number(2), GOOD, b""],
    "no msgpack": [number(2), b"\xc1"],
    "deep nesting": [number(2), DEEP],
    "a map": [number(2), msgpack.packb({"ts": 0.0, "events": []})],
    "a rank without end": [number(2), msgpack.packb([0.0, [], 2**40])],
    "another block size": [number(2), payload(stored(3, parent=2, size=8))],
    "the largest block size": [number(2), of_maps(STORED | {"block_size": 2**64 - 1})],
    "no block size": [number(2), of_maps(STORED | {"block_size": 0})],
    "a block size that is true": [number(2), of_maps(STORED | {"block_size": True, "token_ids": [1]})],
    "a negative token": [number(2), of_maps(STORED | {"block_size": SIZE, "token_ids": [-1] * SIZE})],
    "too few tokens": [number(2), of_maps(STORED | {"block_size": SIZE, "token_ids": [1]})],
    "a list as hash": [number(2), of_maps({"type": "BlockRemoved", "block_hashes": [[1]]})],
    "an unknown parent": [number(2), payload(stored(3, parent=99))],
    "a state": [number(2), payload(StateStored([1]))],
    "too many blocks": [number(2), payload(stored(*range(3, 4 + MAX_EVENT_BLOCKS), parent=2))],
    "more than the pool": [number(2), payload(stored(*range(3, 2 + POOL), parent=2), stored(-1, parent=2))],
    "too many events": [number(2), payload(*[AllBlocksCleared()] * 5_000)],
}


@pytest.mark.parametrize("frames", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_is_counted_and_read_over(caplog, frames):
    """After a message that is not valid the contents are read again, and later messages count as before."""
    async with reading() as (router, reader, replica):
        await eventually(lambda: known(router) == 2)
        await replica.subscribed()
        await replica.store(10)
        await eventually(lambda: known(router) == 3)
        assert reader.faults == 0
        await replica.send(*frames)
        await eventually(lambda: reader.faults == 1)
        await replica.subscribed()
        await eventually(lambda: known(router) == 3)
        await replica.store(11)
        await eventually(lambda: known(router) == 4)
        assert reader.faults == 1
        assert reader._streams[0].starts == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "KV events of replica r: tcp://127.0.0.1:" in caplog.text


async def test_a_publisher_that_starts_again():
    """Numbers that go back are those of another process: its contents are read."""
    async with reading(last=500) as (router, reader, replica):
        await eventually(lambda: known(router) == 2)
        await replica.subscribed()
        await replica.store(10)
        await eventually(lambda: known(router) == 3)
        replica.last, replica.contents = 0, [stored(7)]
        await replica.send(number(0), payload(AllBlocksCleared()))
        await eventually(lambda: known(router) == 1)
        await replica.subscribed()
        await replica.store(8)
        await eventually(lambda: known(router) == 2)
        assert reader.faults == 1


async def test_a_replay_corrects_a_wrong_number_of_an_earlier_one(monkeypatch):
    """A replay that ends at a number far ahead makes live messages look old, until the next replay corrects it."""
    monkeypatch.setattr(event_stream, "QUIET", 0.2)
    ahead = [[number(2**62), payload(AllBlocksCleared(), stored(1, 2))], [END_OF_REPLAY, b""]]
    async with reading(replies=lambda start: ahead) as (router, _, replica):
        await eventually(lambda: known(router) == 2)
        replica.replies = replica.honest

        async def never_quiet() -> None:
            for block in range(10, POOL):
                await replica.store(block)
                await asyncio.sleep(0.01)

        storing = asyncio.ensure_future(never_quiet())
        await eventually(lambda: known(router) > 2)
        assert not storing.done()
        storing.cancel()


REPLAYS: dict[str, list[Frames]] = {
    "numbers that go back": [[number(5), payload(AllBlocksCleared())], [number(4), GOOD], [END_OF_REPLAY, b""]],
    "numbers that jump": [[number(5), payload(AllBlocksCleared())], [number(7), GOOD], [END_OF_REPLAY, b""]],
    "a negative number": [[number(2**64 - 2), GOOD], [END_OF_REPLAY, b""]],
    "no contents": [[number(0), GOOD], [END_OF_REPLAY, b""]],
    "another form": [[b"x"], [END_OF_REPLAY, b""]],
    "no end": [[number(5), payload(AllBlocksCleared(), stored(1))]],
    "nothing": [],
}


@pytest.mark.parametrize("replies", REPLAYS.values(), ids=REPLAYS)
async def test_nonsense_in_replays(monkeypatch, replies):
    monkeypatch.setattr(event_stream, "PATIENCE", 0.05)
    monkeypatch.setattr(event_stream, "QUIET", 0.05)
    async with reading(replies=lambda start: replies) as (router, reader, replica):
        await eventually(lambda: reader.faults >= 2)
        replica.replies = replica.honest
        await eventually(lambda: known(router) == 2)


async def test_a_gap_that_is_not_replayed_leaves_messages_out(monkeypatch):
    """A later message is not applied before the missing ones are known."""
    monkeypatch.setattr(event_stream, "PATIENCE", 0.05)
    async with reading() as (router, reader, replica):
        await eventually(lambda: known(router) == 2)
        await replica.subscribed()
        replica.replies = lambda start: []
        replica.last, replica.contents = 2, [stored(1, 2, 3)]
        await replica.send(number(2), payload(BlockRemoved([2])))
        await eventually(lambda: reader.faults >= 1)
        assert known(router) == 2
        replica.replies = replica.honest
        await replica.store(4)
        await eventually(lambda: known(router) == 4)


async def test_a_mistake_in_the_reader_is_logged_and_the_reader_goes_on(monkeypatch, caplog):
    """An unexpected exception is counted, logged with its traceback, and starts the stream again."""
    apply, failures = PublishedCache.apply_blocks, [RuntimeError("planted")]

    def fail_once(self: PublishedCache, event: Event):
        if failures and isinstance(event, BlockStored):
            raise failures.pop()
        return apply(self, event)

    monkeypatch.setattr(PublishedCache, "apply_blocks", fail_once)
    async with reading() as (router, reader, _):
        await eventually(lambda: known(router) == 2)
        assert reader.faults == 1
    assert "RuntimeError: planted" in caplog.text


async def test_a_reader_that_is_closed_while_a_message_arrives_ends():
    """The cancellation is not lost if the awaited message has just come in."""
    async with reading() as (router, reader, _):
        await eventually(lambda: known(router) == 2)
        (stream,) = reader._streams
        message = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(stream._received(SimpleNamespace(recv_multipart=lambda: message), PATIENCE))
        await asyncio.sleep(0)
        message.set_result([b""])
        reader._tasks, tasks = [waiting], reader._tasks
        reader.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        reader._tasks = tasks


async def test_faults_without_end_are_one_line(caplog):
    async with reading(replies=lambda start: [[b"x"]]) as (_, reader, _):
        await eventually(lambda: reader.faults >= 5)
    assert len(caplog.records) == 1


async def test_an_address_that_is_none(caplog):
    """An endpoint that ZeroMQ refuses is a fault of its replica."""
    router = Router(RoutingConfig())
    router.join("r", SIZE)
    reader = EventReader(router, "r", [EventSource("tcp://nohost", None, "t")], SIZE, POOL)
    await eventually(lambda: reader.faults >= 2)
    assert not any(task.done() for task in reader._tasks)
    reader.close()


def padded(size: int) -> bytes:
    """A valid batch of so many bytes, whose event is of an unknown type."""
    head = msgpack.packb([0.0, [{"type": "Padding"}], 0]).replace(b"\x81\xa4type", b"\x82\xa4type", 1)[:-1]
    pad = size - len(head) - 2 - 5 - 1
    return head + msgpack.packb("x") + b"\xc6" + pad.to_bytes(4, "big") + bytes(pad) + b"\x00"


async def test_size_of_a_message(monkeypatch):
    """A message at the bound is read; ZeroMQ refuses a larger one, whatever it is, and a replay makes up for it."""
    monkeypatch.setattr(event_stream, "QUIET", 0.1)
    async with reading() as (router, reader, replica):
        await eventually(lambda: known(router) == 2)
        await replica.subscribed()
        longest = padded(MAX_MESSAGE_BYTES)
        assert len(longest) == MAX_MESSAGE_BYTES
        stream = reader._streams[0]
        replica.last = 1
        await replica.send(number(1), longest)
        await eventually(lambda: stream._next == 2)
        replica.last = 2
        await replica.send(number(2), longest + b"x")
        await replica.subscribed()  # the connection was closed, and is made again
        await eventually(lambda: stream._next == 3)
        await replica.store(10)
        await eventually(lambda: known(router) == 3)
        assert reader.faults == 0


async def test_a_subscription_without_replays_is_made_again(monkeypatch):
    """Without replays a message that exceeds the bound cuts a subscription off, too; silence starts another one."""
    monkeypatch.setattr(event_stream, "QUIET", 0.05)
    replica = Replica()
    async with reading(source=dataclasses.replace(replica.source, replay=None)) as (router, _, _):
        await replica.subscribed()
        await replica.send(number(5), payload(stored(1, 2)))
        await eventually(lambda: known(router) == 2)
        await replica.send(number(6), bytes(MAX_MESSAGE_BYTES + 1))
        await replica.subscribed()
        await replica.send(number(7), payload(stored(3, parent=2)))
        await eventually(lambda: known(router) == 3)
        await replica.send(number(8), payload(stored(4, parent=99)))  # its parent was lost
        await replica.send(number(9), payload(stored(5, parent=3)))
        await eventually(lambda: known(router) == 4)
    await replica.close()


async def test_without_replays_an_invalid_message_clears_known_contents():
    """Nothing that a faulty replica has said is believed until it says more."""
    replica = Replica()
    async with reading(source=dataclasses.replace(replica.source, replay=None)) as (router, _, _):
        await replica.subscribed()
        await replica.send(number(5), payload(stored(1, 2)))
        await eventually(lambda: known(router) == 2)
        await replica.send(number(6), b"x")
        await eventually(lambda: known(router) == 0)
        await replica.subscribed()
        await replica.send(number(7), payload(stored(3)))
        await eventually(lambda: known(router) == 1)
    await replica.close()


async def test_large_contents_leave_turns_to_other_tasks():
    """The event loop is free after each event of a replay and after each slice of a reset."""
    runs = [stored(*range(first, first + 64), parent=first - 1 or None) for first in range(1, POOL, 64)]
    router = Router(RoutingConfig())
    router.join("r", SIZE)
    cache = PublishedCache(router, "r", 0, SIZE, POOL)
    stream = event_stream.EventStream("", None, "", cache.apply_blocks, cache.clear_blocks, event_stream.Faults("r"))

    async def turns(events: Sequence[Event]) -> int:
        count, telling = 0, asyncio.ensure_future(stream._tell(0, events))
        while not telling.done():
            count += 1
            await asyncio.sleep(0)
        await telling
        return count

    assert await turns(runs) >= len(runs)
    assert known(router) == POOL
    assert await turns([AllBlocksCleared()]) >= POOL / 256
    assert known(router) == 0


async def test_faults_are_counted_for_operators():
    """The metric of a replica grows with its faults, and other replicas' requests are answered."""
    replica = Replica()
    replica.replies = lambda start: [[b"x"]]
    source = replica.source
    events = [{"endpoint": source.endpoint, "replay": source.replay, "topic": "t"}]
    strange, other = await FakeReplica(beat={"kv_events": events}).start(), await FakeReplica().start()
    async with coordinator(strange, other) as front:
        (reader,) = front.coordination._readers.values()
        await eventually(lambda: reader.faults >= 2)
        line = f'megatron_ext_coordinator_event_faults_total{{replica="{strange.url}"}}'
        text = (await front.http.get("/metrics")).text
        assert float(text.split(line)[1].split()[0]) >= 2
        for first in range(4):
            assert (await front.complete([first] * 8)).status_code == 200
    for one in (strange, other):
        await one.stop()
    await replica.close()
