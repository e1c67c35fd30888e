"""Log of a cache's events for routers of Ray Serve: what a reader gets, however late or often it asks."""

from __future__ import annotations

import asyncio
from array import array

from megatron_ext.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, StateStored
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.ray_serve.cache_log import CacheLog, LogPosition

SIZE = 4


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(log: CacheLog, *numbers: int, parent: int | None = None) -> None:
    """Store a run of blocks, which have the numbers as their block hashes and tokens."""
    tokens = array("I", [number for number in numbers for _ in range(SIZE)])
    before = None if parent is None else block(parent)
    log.changes.on_blocks_stored(PublishedRun(tuple(map(block, numbers)), before, tokens, len(tokens), SIZE, None))


def new_log(max_events: int = 8, *, has_states: bool = False) -> CacheLog:
    return CacheLog(Mirror(SIZE, has_states=has_states), max_events)


def kinds(events) -> list[type]:
    return list(map(type, events))


def test_a_new_reader_gets_the_whole_contents_and_then_changes_only():
    """RP-1: the first report clears what was known; later ones have each event once, also for a second reader."""
    log = new_log()
    store(log, 1, 2)
    first = log.report(LogPosition())
    assert first.is_whole
    assert kinds(first.events)[0] is AllBlocksCleared
    assert [len(event.hashes) for event in first.events if isinstance(event, BlockStored)] == [2]
    log.changes.on_blocks_removed([block(2)])
    second = log.report(first.position)
    assert not second.is_whole
    assert kinds(second.events) == [BlockRemoved]
    assert log.report(first.position) == second, "another reader at the same position"
    assert log.report(second.position).events == ()


def test_a_reader_that_is_too_late_gets_the_whole_contents():
    """RP-1: the log keeps so many events; behind them, ahead of them, or in another log, a reader starts again."""
    log = new_log(max_events=2)
    start = log.report(LogPosition()).position
    for number in range(1, 5):
        store(log, number)
        last = log.report(start)
        assert last.is_whole is (number > 2)
    assert {event.hashes[0] for event in last.events if isinstance(event, BlockStored)} == {
        *(event.hashes[0] for event in log.report(LogPosition()).events if isinstance(event, BlockStored))
    }
    assert log.report(LogPosition(start.log, last.position.number + 1)).is_whole
    assert log.report(LogPosition("another", last.position.number)).is_whole
    assert not log.report(last.position).is_whole


def test_states_are_reported_beside_their_blocks():
    """RP-1: with recurrent layers a run is reported up to its last snapshot, and the snapshot with it."""
    log = new_log(has_states=True)
    position = log.report(LogPosition()).position
    store(log, 1, 2, 3)
    assert log.report(position).events == ()
    log.changes.on_snapshot_stored(block(2))
    stored, state = log.report(position).events
    assert isinstance(stored, BlockStored)
    assert isinstance(state, StateStored)
    assert len(stored.hashes) == 2
    assert state.hashes == stored.hashes[1:]


async def test_waiting_ends_with_the_next_change():
    """RP-1: every reader that waits is woken by a change of another thread; without one it gets an empty report."""
    log = new_log()
    position = log.report(LogPosition()).position
    assert (await log.wait(position, 0.0)).events == ()
    waiting = [asyncio.create_task(log.wait(position, 3600.0)) for _ in range(2)]
    while len(log._waiting) < 2:
        await asyncio.sleep(0)
    await asyncio.to_thread(store, log, 1)
    reports = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert [kinds(report.events) for report in reports] == [[BlockStored]] * 2
    assert not log._waiting
