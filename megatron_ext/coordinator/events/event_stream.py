"""Stream of KV events from one address: numbered batches, replays of lost ones, and a new start after any fault.

A stream starts with the current contents of the cache, so a restarted coordinator knows them at once. Later it requests
a replay when a number is skipped, and whenever no batch has been accepted for a while, since the last batch may be the
lost one. Whatever a replica sends, the stream goes on: a message that is not valid, or contradicts earlier ones, is
counted and logged, and the stream starts again with the current contents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from megatron_ext.config.fleet_limits import MAX_MESSAGE_BYTES, MAX_SEQUENCE
from megatron_ext.coordinator.supervision import within
from megatron_ext.kv_events.events import AllBlocksCleared, AllStatesCleared, Event
from megatron_ext.kv_events.throttle import Throttle
from megatron_ext.kv_events.wire import END_OF_REPLAY, SEQUENCE_BYTES, WireError, decode, decode_sequence
from megatron_ext.routing.published_cache import EventError, UnknownParentError

logger = logging.getLogger(__name__)

QUIET = 2.0  # seconds without an accepted batch before a replay is requested
PATIENCE = 5.0  # seconds for the next message of a replay
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between a fault and the new start; doubled each time
_REPLAY_ALL = MAX_SEQUENCE  # a number beyond all batches: its replay is the current contents
_MAX_WAITING = 256  # messages that ZeroMQ queues, up to 256 MB; more are lost, and replayed
_MAX_REPLAY = 2**20  # messages of one replay


@dataclass
class Faults:
    """Faults of one replica's streams: counted, and logged at most once a minute.

    Attributes:
        replica: Name of the replica.
        count: Faults so far.
        on_fault: Called at each fault.
    """

    replica: str
    count: int = 0
    on_fault: Callable[[], None] = lambda: None
    _throttle: Throttle = field(default_factory=Throttle)

    def note(self, problem: str, error: BaseException | None = None) -> None:
        """Count and log a fault.

        Args:
            problem: Text of the line.
            error: Error of this program, whose traceback is logged; None for a mistake of the replica.
        """
        self.count += 1
        self.on_fault()
        if covered := self._throttle.admit():
            logger.warning("KV events of replica %s: %s (faults: %d)", self.replica, problem, covered, exc_info=error)


class EventStream:
    """Reader of one address, until its task is cancelled.

    Args:
        endpoint: Address to subscribe to.
        replay: Address of replays; None without replays, when only what comes is known.
        topic: Topic to subscribe to.
        apply: Applies an event, yields where other tasks may run, and raises `EventError`.
        clear: Forgets all that the stream has reported, and yields where other tasks may run.
        faults: Faults of the replica.

    Attributes:
        read: Events that have been applied.
        starts: Number of starts; each but the first follows a fault.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        topic: str,
        apply: Callable[[Event], Iterator[None]],
        clear: Callable[[], Iterator[None]],
        faults: Faults,
    ) -> None:
        self._endpoint, self._replay, self._topic = endpoint, replay, topic.encode()
        self._apply, self._clear, self._faults = apply, clear, faults
        self.read = self.starts = 0
        self._next = 0  # number of the next batch

    async def run(self) -> None:
        """Read until cancelled; start again after any fault."""
        delay = FIRST_DELAY
        while True:
            began = time.monotonic()
            await self._supervise(self._follow)
            await self._supervise(self._forget)
            if time.monotonic() - began > LONGEST_DELAY:
                delay = FIRST_DELAY
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    async def _supervise(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (EventError, WireError, zmq.ZMQError) as error:
            self._faults.note(f"{self._endpoint}: {error}")
        except Exception as error:  # a mistake of this program: the stream starts again all the same
            self._faults.note(f"{self._endpoint}: the reader has failed", error)

    async def _forget(self) -> None:
        await _in_turns(self._clear())

    async def _follow(self) -> None:
        """Subscribe, read the current contents, and apply all that comes.

        Raises:
            EventError, WireError: A message is not valid.
            zmq.ZMQError: The address is not valid.
        """
        self.starts += 1
        self._next, start = 0, _REPLAY_ALL
        while True:
            with _socket(zmq.SUB, self._endpoint) as events:
                events.setsockopt(zmq.SUBSCRIBE, self._topic)
                await self._ask(start)
                await self._listen(events)
            start = self._next

    async def _listen(self, events: zmq.asyncio.Socket) -> None:
        """Apply what a subscription receives, until it seems to be cut off.

        ZeroMQ does not connect again after a message that exceeds the bound. Then either a replay has batches that the
        subscription has not received, or, without replays, nothing arrives any more.

        Raises:
            EventError, WireError: A message is not valid.
        """
        last, received_at = -1, time.monotonic()
        due = received_at + QUIET
        while True:
            frames = await self._received(events, due - time.monotonic())
            now = time.monotonic()
            if frames is None:
                known = self._next
                await self._ask(known)
                if self._next != known or (self._replay is None and now - received_at > LONGEST_DELAY):
                    return
                due = time.monotonic() + QUIET
                continue
            received_at = now
            number, payload = _numbered(frames)
            if number <= last:
                raise EventError(f"message {number} after message {last}")
            last = number
            if await self._take(number, payload):
                due = time.monotonic() + QUIET

    async def _take(self, number: int, payload: bytes) -> bool:
        """Apply a batch, after those that are missing before it.

        Returns:
            Whether the batch was accepted; not if it was in a replay, or if those before it were not replayed yet.

        Raises:
            EventError, WireError: The batch is not valid.
        """
        if number > self._next and not await self._ask(self._next):
            return False
        if number < self._next:
            return False
        if number > self._next and self._replay is not None:
            raise EventError(f"message {number}, where replays end at {self._next - 1}")
        await self._tell(number, decode(payload).events)
        return True

    async def _tell(self, number: int, events: Sequence[Event]) -> None:
        self._next = number + 1
        for event in events:
            try:
                await _in_turns(self._apply(event))
            except UnknownParentError:
                if self._replay is not None:
                    raise
            self.read += 1
            await asyncio.sleep(0)

    async def _ask(self, start: int) -> bool:
        """Replay all batches from a number on; if they are no longer kept, the replay is the current contents.

        Returns:
            Whether the replay is complete; true without replays.

        Raises:
            EventError, WireError: A message of the replay is not valid.
        """
        if self._replay is None:
            return True
        previous, is_whole = start - 1, False
        with _socket(zmq.DEALER, self._replay) as asking:
            await asking.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            for place in range(_MAX_REPLAY):
                frames = await self._received(asking, PATIENCE)
                if frames is None:
                    self._faults.note(f"{self._replay} does not replay events")
                    self._next = 0 if is_whole else self._next
                    return False
                if len(frames) == 3 and frames[1] == END_OF_REPLAY:
                    return True
                number, payload = _numbered(frames)
                batch = decode(payload).events
                is_whole |= not place and bool(batch) and isinstance(batch[0], AllBlocksCleared | AllStatesCleared)
                is_next = number == previous + 1 or (is_whole and (not place or number == previous))
                if not is_next:
                    raise EventError(f"message {number} after message {previous} in a replay from {start} on")
                previous = number
                await self._tell(number, batch)
        raise EventError(f"a replay of more than {_MAX_REPLAY} messages")

    async def _received(self, one: zmq.asyncio.Socket, seconds: float) -> list[bytes] | None:
        """Return the next message; None if none comes in time."""
        frames = None
        with contextlib.suppress(asyncio.TimeoutError):
            frames = await within(max(0.0, seconds), one.recv_multipart())
        return frames


def _socket(kind: int, endpoint: str) -> zmq.asyncio.Socket:
    """Return a connected socket whose messages are bounded in size and number.

    Raises:
        zmq.ZMQError: The address is not valid.
    """
    one = zmq.asyncio.Context.instance().socket(kind)
    one.setsockopt(zmq.LINGER, 0)
    one.setsockopt(zmq.RCVHWM, _MAX_WAITING)
    one.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    one.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        one.connect(endpoint)
    except BaseException:
        one.close()
        raise
    return one


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the number and the payload of a message: the second and the third of its frames.

    Raises:
        WireError: The message has another form.
    """
    if len(frames) != 3:
        raise WireError(f"a message of {len(frames)} frames in place of 3")
    return decode_sequence(frames[1]), frames[2]


async def _in_turns(steps: Iterator[None]) -> None:
    """Run steps, with a turn for other tasks after each."""
    for _ in steps:
        await asyncio.sleep(0)
