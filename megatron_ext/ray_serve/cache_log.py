"""Reports of a replica to routers of Ray Serve: its shape, and a log of each cache's KV events.

Routers read them with actor calls. Needs neither Ray nor torch.

A router asks for the events after its last one. The log keeps a bounded number of events; a router that asks for older
events, or for another process's, gets the whole contents of the cache instead. Pending changes are bounded by the cache
itself (`kv_events/changes.py`), so a replica without any router keeps no more than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice

from megatron_ext.kv_events.changes import Changes
from megatron_ext.kv_events.events import Event
from megatron_ext.kv_events.mirror import CacheEvents, Mirror

MAX_LOG_EVENTS = 1024


@dataclass(frozen=True)
class ReplicaFacts:
    """Facts of a replica that do not change while its process lives.

    Attributes:
        block_size: Tokens of a block.
        blocks: Blocks of each cache's pool.
        has_states: Whether requests resume only at snapshots.
        caches: Number of caches: data-parallel ranks of the replica's world.
        tag: Tag of the replica in the ids of responses.
    """

    block_size: int
    blocks: int
    has_states: bool
    caches: int = 1
    tag: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the facts as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, object]) -> ReplicaFacts:
        """Return the facts that `to_dict` gave.

        Raises:
            ValueError: A field is missing or has another type: the replica has another version of this package.
        """
        try:
            facts = cls(**content)  # type: ignore[arg-type]  # checked next
        except TypeError as error:
            raise ValueError(f"facts of a replica of another version: {error}") from None
        if any(type(one) is not int or one < 1 for one in (facts.block_size, facts.blocks, facts.caches)):
            raise ValueError(f"facts of a replica of another version: {content}")
        return facts


@dataclass(frozen=True)
class LogPosition:
    """Position of a reader.

    Attributes:
        log: Id of the log; empty for a reader that knows nothing.
        number: Number of the next event.
    """

    log: str = ""
    number: int = 0


@dataclass(frozen=True)
class CacheReport:
    """Answer to a reader.

    Attributes:
        position: Position after these events, for the next call.
        events: Events of blocks and states, in order.
        is_whole: Whether the events describe the whole contents, and begin with clearing the reader's state.
    """

    position: LogPosition
    events: tuple[Event, ...]
    is_whole: bool


class CacheLog:
    """Log of a cache's events; its `changes` are the cache's observer.

    Args:
        mirror: Mirror of the cache, which is still empty.
        max_events: Maximum number of events that are kept.
    """

    def __init__(self, mirror: Mirror, max_events: int = MAX_LOG_EVENTS) -> None:
        self.changes = Changes(self._wake)
        self._mirror = mirror
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()  # of all below
        self._kept: deque[Event] = deque(maxlen=max_events)
        self._next = 0  # number of the next event
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def report(self, position: LogPosition) -> CacheReport:
        """Return the events from a position on, or the whole contents if they are no longer kept."""
        with self._lock:
            delta = self.changes.take()
            if delta is not None:
                self._append(_events(self._mirror.apply(delta)))
            first = self._next - len(self._kept)
            is_whole = position.log != self._id or not first <= position.number <= self._next
            if is_whole:
                events = _events(self._mirror.present())
            else:
                events = tuple(islice(self._kept, position.number - first, None))
            return CacheReport(LogPosition(self._id, self._next), events, is_whole)

    async def wait(self, position: LogPosition, patience: float) -> CacheReport:
        """Return the report of a position as soon as it has an event, or an empty one.

        Args:
            position: Position of the reader.
            patience: Maximum wait in seconds.
        """
        changed = asyncio.Event()
        waiter = asyncio.get_running_loop(), changed
        with self._lock:
            self._waiting.append(waiter)
        try:
            report = await asyncio.to_thread(self.report, position)
            if not report.events:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), patience)
                report = await asyncio.to_thread(self.report, position)
        finally:
            with self._lock:
                self._waiting.remove(waiter)
        return report

    def _append(self, events: tuple[Event, ...]) -> None:
        self._kept.extend(events)
        self._next += len(events)

    def _wake(self) -> None:
        """Wake all readers; called by the engine's thread, which never waits for a reader here."""
        for loop, changed in tuple(self._waiting):
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(changed.set)


def _events(pending: CacheEvents) -> tuple[Event, ...]:
    """Return all events in one order; readers accept a state before its block and after it."""
    return (*pending.blocks, *pending.states)
