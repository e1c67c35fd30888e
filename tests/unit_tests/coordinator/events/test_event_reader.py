"""RP-1, RP-3, RP-4: the router learns the events that a replica publishes, despite losses and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator

from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.events.event_reader import EventReader
from megatron_ext.coordinator.events.event_stream import EventStream
from megatron_ext.coordinator.membership.heartbeat import EventSource
from megatron_ext.kv_events.events import (
    AllBlocksCleared,
    AllStatesCleared,
    BlockRemoved,
    BlockStored,
    StateRemoved,
    StateStored,
)
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router
from tests.unit_tests.support.fleet import FakeReplica, coordinator, eventually

SIZE = 4
POOL = 64  # blocks
LOCAL = "tcp://127.0.0.1:0"


def published(blocks: int, *, salt: str | None = None, first: int = 0) -> PublishedRun:
    """A run from the start of a sequence."""
    tokens = packed_tokens(range(first, first + blocks * SIZE))
    block_hashes = [bytes([first % 256, number]) + (salt or "").encode() for number in range(blocks)]
    return PublishedRun(block_hashes, None, tokens, SIZE, blocks * SIZE, salt)


@contextlib.contextmanager
def publisher(buffered: int = 10, replay: str | None = LOCAL, *, has_states: bool = False):
    states = (LOCAL, replay) if has_states else (None, None)
    one = Publisher(KvEventsConfig(LOCAL, "kv-events", replay, buffered, *states))
    one.start(Mirror(SIZE, has_states=has_states))
    try:
        yield one
    finally:
        one.close()


def source(one: Publisher) -> EventSource:
    states = (None, None) if one.states is None else (one.states.endpoint, one.states.replay_endpoint)
    return EventSource(one.blocks.endpoint, one.blocks.replay_endpoint, "kv-events", *states)


def announced(one: Publisher) -> list[dict[str, str | None]]:
    """The addresses of a publisher as a heartbeat has them."""
    return [dataclasses.asdict(source(one))]


@contextlib.asynccontextmanager
async def reading(
    *publishers: Publisher, has_states: bool = False, pool: int = POOL
) -> AsyncIterator[tuple[Router, EventReader]]:
    router = Router(RoutingConfig())
    router.join("r", SIZE, has_states=has_states)
    reader = EventReader(router, "r", [source(one) for one in publishers], SIZE, pool)
    try:
        yield router, reader
    finally:
        reader.close()
    router.check()


def known(router: Router) -> int:
    return router.replicas()[0].blocks


def skipped(router: Router, prompt: Prompt) -> int:
    return router.route(prompt).skipped


async def test_contents_from_before_the_start_and_later_events():
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


async def test_lost_events_are_requested(monkeypatch):
    """Missing events are requested again after a jump of the publisher's number, and after a silence."""
    monkeypatch.setattr("megatron_ext.coordinator.events.event_stream.QUIET", 0.1)
    take = EventStream._take

    async def lossy(self: EventStream, number: int, payload: bytes) -> bool:
        return number % 3 != 0 and await take(self, number, payload)

    monkeypatch.setattr(EventStream, "_take", lossy)
    with publisher() as one:
        async with reading(one) as (router, reader):
            await eventually(lambda: reader.events > 0)
            for blocks in range(1, 10):
                one.changes.on_blocks_stored(published(blocks, first=200 * (blocks % 4)))
            await eventually(lambda: known(router) == 9 + 6 + 7 + 8)
            assert reader.faults == 0


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
            one.changes.on_cleared()
            await eventually(lambda: known(router) == 3)


async def test_a_snapshot_counts_while_its_block_is_known(monkeypatch):
    """The sockets of blocks and states are not ordered: a snapshot may be reported first, or removed last."""
    with publisher(has_states=True) as one:
        async with reading(one, has_states=True) as (router, reader):
            await eventually(lambda: reader.events >= 2)
            blocks, states = reader._streams
            hashes = list(range(3))
            run = BlockStored(hashes, None, packed_tokens(range(3 * SIZE)), SIZE)
            prompt = router.prompt(range(4 * SIZE))
            await states._tell(0, [StateStored([1])])
            assert (known(router), skipped(router, prompt)) == (0, 0)
            await blocks._tell(0, [run])
            assert skipped(router, prompt) == 2 * SIZE
            await blocks._tell(0, [AllBlocksCleared()])
            assert skipped(router, prompt) == 0
            await blocks._tell(0, [run])
            assert skipped(router, prompt) == 2 * SIZE, "a reset of blocks says nothing of snapshots"
            await blocks._tell(0, [BlockRemoved([2, 1])])
            assert (known(router), router.replicas()[0].states) == (1, 0)
            await states._tell(0, [StateRemoved([1])])
            await blocks._tell(0, [run])
            assert skipped(router, prompt) == 0
            await states._tell(0, [StateStored([0, 2])])
            assert skipped(router, prompt) == 3 * SIZE
            await states._tell(0, [AllStatesCleared(), StateStored([0])])
            assert skipped(router, prompt) == SIZE
            assert reader.faults == 0


async def test_a_hybrid_replica_is_followed_over_both_sockets(monkeypatch):
    """RP-3: runs and snapshots that are stored, evicted and cleared, with messages lost on either socket."""
    monkeypatch.setattr("megatron_ext.coordinator.events.event_stream.QUIET", 0.1)
    take, seen = EventStream._take, itertools.count()

    async def lossy(self: EventStream, number: int, payload: bytes) -> bool:
        return next(seen) % 3 != 0 and await take(self, number, payload)

    monkeypatch.setattr(EventStream, "_take", lossy)
    with publisher(buffered=3, has_states=True) as one:
        async with reading(one, has_states=True) as (router, reader):
            prompts = [router.prompt(range(first, first + 5 * SIZE)) for first in (0, 100)]
            for first in (0, 100):
                run = published(4, first=first)
                one.changes.on_blocks_stored(run)
                one.changes.on_snapshot_stored(run.block_hashes[2])
                await eventually(lambda: skipped(router, prompts[0]) == 3 * SIZE)
            await eventually(lambda: skipped(router, prompts[1]) == 3 * SIZE)
            first, second = published(4), published(4, first=100)
            one.changes.on_snapshot_removed(first.block_hashes[2])
            one.changes.on_blocks_removed(first.block_hashes[::-1])
            one.changes.on_snapshot_stored(second.block_hashes[3])
            await eventually(lambda: [skipped(router, one) for one in prompts] == [0, 4 * SIZE])
            one.changes.on_cleared()
            await eventually(lambda: (known(router), skipped(router, prompts[1])) == (0, 0))
            one.changes.on_blocks_stored(second)
            one.changes.on_snapshot_stored(second.block_hashes[0])
            await eventually(lambda: skipped(router, prompts[1]) == SIZE)
            assert reader.faults == 0


async def test_without_events_of_states_runs_count_in_full():
    """A hybrid replica that publishes blocks alone: its runs end at snapshots, so their length is the estimate."""
    with publisher() as one:
        one.changes.on_blocks_stored(published(3))
        fake = await FakeReplica(beat={"kv_events": announced(one), "has_states": True}).start()
        async with coordinator(fake) as front:
            router = front.coordination.router
            await eventually(lambda: known(router) == 3)
            assert skipped(router, router.prompt(range(5 * SIZE))) == 3 * SIZE
        await fake.stop()


async def test_without_replay_live_events_are_applied():
    with publisher(replay=None) as one:
        async with reading(one) as (router, reader):
            number = 0
            while not reader.events:  # a subscription takes a moment, and nothing reports when it is established
                number += 1
                one.changes.on_blocks_stored(published(1, first=number * SIZE))
                await asyncio.sleep(0.02)
            assert 0 < known(router) <= number


async def test_coordinator_knows_published_contents():
    """RP-3: contents of a replica with events are not guessed; after a restart they are requested again."""
    with publisher() as one:
        fake = await FakeReplica(beat={"kv_events": announced(one)}).start()
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
        fake = await FakeReplica(beat={"kv_events": announced(one)}).start()
        async with coordinator(fake) as front:
            reader = front.coordination._readers[fake.url]
            front.coordination.fleet.remove(fake.url)
            await eventually(lambda: all(task.cancelled() for task in reader._tasks))
        await fake.stop()
