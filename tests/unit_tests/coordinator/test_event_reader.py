"""RP-1, RP-3, RP-4: the router learns the events that a replica publishes, despite losses and restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.event_reader import EventReader
from megatron_ext.coordinator.heartbeat import EventSource
from megatron_ext.kv_events.events import BlockRemoved, BlockStored
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.kv_events.wire import encode
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.prefix_cache.public_hash import event_hash
from megatron_ext.routing.router import Router
from tests.unit_tests.support.fleet import FakeReplica, coordinator, eventually

SIZE = 4
LOCAL = "tcp://127.0.0.1:0"


def published(blocks: int, *, salt: str | None = None, first: int = 0) -> PublishedRun:
    """A run from the start of a sequence."""
    tokens = packed_tokens(range(first, first + blocks * SIZE))
    block_hashes = [bytes([first % 256, number]) + (salt or "").encode() for number in range(blocks)]
    return PublishedRun(block_hashes, None, tokens, SIZE, blocks * SIZE, salt)


@contextlib.contextmanager
def publisher(buffered: int = 10, replay: str | None = LOCAL):
    config = KvEventsConfig(kv_events_endpoint=LOCAL, kv_events_replay_endpoint=replay, kv_events_buffer_steps=buffered)
    one = Publisher(config)
    one.start(Mirror(SIZE, has_states=False))
    try:
        yield one
    finally:
        one.close()


def source(one: Publisher) -> EventSource:
    return EventSource(one.endpoint, one.replay_endpoint, "kv-events")


@contextlib.asynccontextmanager
async def reading(*publishers: Publisher) -> AsyncIterator[tuple[Router, EventReader]]:
    router = Router(RoutingConfig())
    router.join("r", SIZE)
    reader = EventReader(router, "r", [source(one) for one in publishers])
    yield router, reader
    reader.close()
    router.check()


def known(router: Router) -> int:
    return router.replicas()[0].blocks


async def test_what_was_there_before_and_what_comes_later():
    """RP-4: a reader that begins late, as that of a restarted coordinator, is told what there is."""
    with publisher(buffered=1) as one:
        one.changes.on_blocks_stored(published(5))
        async with reading(one) as (router, _):
            await eventually(lambda: known(router) == 5)
            one.changes.on_blocks_stored(published(3, first=100, salt="s"))
            await eventually(lambda: known(router) == 8)
            prompt = router.prompt(range(20))
            assert router.route(prompt).skipped == 19
            one.changes.on_blocks_removed(published(5).block_hashes[3:])
            await eventually(lambda: known(router) == 6)
            assert router.route(prompt).skipped == 12
            one.changes.on_cleared()
            await eventually(lambda: known(router) == 0)
        async with reading(one) as (router, _):
            one.changes.on_blocks_stored(published(2))
            await eventually(lambda: known(router) == 2)


async def test_what_was_lost_is_asked_for(monkeypatch):
    """Missing events are requested again after a jump of the publisher's number, and after a silence."""
    monkeypatch.setattr("megatron_ext.coordinator.event_reader.QUIET", 0.1)
    with publisher() as one:
        async with reading(one) as (router, reader):
            await eventually(lambda: reader.events > 0)
            stream = reader._streams[0]
            take = stream._take

            async def lossy(number: int, payload: bytes) -> None:
                if number % 3 != 0:
                    await take(number, payload)

            stream._take = lossy
            for blocks in range(1, 10):
                one.changes.on_blocks_stored(published(blocks, first=200 * (blocks % 4)))
            await eventually(lambda: known(router) == 9 + 6 + 7 + 8)


async def test_two_caches_of_one_world_are_one_replica():
    with publisher() as one, publisher() as two:
        async with reading(one, two) as (router, _):
            one.changes.on_blocks_stored(published(5))
            two.changes.on_blocks_stored(published(3))
            await eventually(lambda: known(router) == 8)
            one.changes.on_blocks_removed(published(5).block_hashes)
            await eventually(lambda: known(router) == 3)
            assert router.route(router.prompt(range(20))).skipped == 12
            one.changes.on_cleared()
            one.changes.on_blocks_stored(published(1, first=400))
            await eventually(lambda: known(router) == 4)  # the block comes after the reset, which was of one alone


async def test_a_reader_that_lost_something_asks_until_it_knows_all(monkeypatch):
    """TE-6: an event that does not fit is not forgotten for one that does; what is there now makes up for both."""
    monkeypatch.setattr("megatron_ext.coordinator.event_reader.QUIET", 0.05)
    monkeypatch.setattr("megatron_ext.coordinator.event_reader._REST", 0.01)
    with publisher() as one:
        one.changes.on_blocks_stored(published(5))
        async with reading(one) as (router, reader):
            await eventually(lambda: known(router) == 5)
            stream = reader._streams[0]
            last, hashes = stream._next - 1, [event_hash(block_hash) for block_hash in published(5).block_hashes]
            stream._tell(last, encode(0.0, [BlockStored([99], 98, packed_tokens(range(SIZE)), SIZE)], 0))
            assert not stream.is_whole
            stream._tell(last, encode(0.0, [BlockRemoved(hashes)], 0))
            assert known(router) == 0
            assert not stream.is_whole
            await eventually(lambda: known(router) == 5)
            assert stream.is_whole


async def test_without_replay_what_comes_is_known():
    with publisher(replay=None) as one:
        async with reading(one) as (router, reader):
            number = 0
            while not reader.events:  # a subscription takes a moment, and nothing reports when it is established
                number += 1
                one.changes.on_blocks_stored(published(1, first=number * SIZE))
                await asyncio.sleep(0.02)
            assert 0 < known(router) <= number


async def test_a_coordinator_knows_what_its_replicas_publish():
    """RP-3: contents of a replica with events are not guessed; after a restart they are requested again."""
    with publisher() as one:
        events = [{"endpoint": one.endpoint, "replay": one.replay_endpoint, "topic": "kv-events"}]
        fake = await FakeReplica(beat={"kv_events": events}).start()
        one.changes.on_blocks_stored(published(5))
        async with coordinator(fake, replica_timeout=0.5) as front:
            await eventually(lambda: known(front.coordination.router) == 5)
            await front.complete(list(range(100, 160)))
            assert known(front.coordination.router) == 5, "it has not said that it has these"
            assert front.coordination.rows()[0]["has_events"]
        async with coordinator(fake, replica_timeout=0.5) as front:
            await eventually(lambda: known(front.coordination.router) == 5)
        await fake.stop()


async def test_a_replica_that_leaves_is_not_read_any_more():
    """TE-6: the reader of a replica that left ends, so that the router gets no events of it."""
    with publisher() as one:
        events = [{"endpoint": one.endpoint, "replay": one.replay_endpoint, "topic": "kv-events"}]
        fake = await FakeReplica(beat={"kv_events": events}).start()
        async with coordinator(fake) as front:
            reader = front.coordination._readers[fake.url]
            front.coordination.fleet.remove(fake.url)
            await eventually(lambda: all(task.cancelled() for task in reader._tasks))
        await fake.stop()
