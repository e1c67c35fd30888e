"""A replica: prompts are computed one by one, answers beside one another, blocks stay until others need theirs."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.routing.traffic import UNIT_TOKENS, Session

PREFILL = 20_000 / UNIT_TOKENS  # units a second
DECODE = 0.015 * UNIT_TOKENS  # seconds a unit
OVERHEAD = 0.01  # seconds a prompt
MAX_RUNNING = 48  # requests


@dataclass(eq=False, slots=True)
class Request:
    """Turn of a session.

    Attributes:
        session: Session of the turn.
        turn: Index in the session.
        asked: Arrival time in seconds; a retry keeps the first time.
        units: Units of the prompt.
        keys: Keys of the prompt's blocks.
        answer: Units of the answer.
        more_keys: Keys of the answer's blocks.
        matched: Blocks that were cached when it began.
        skipped: Units; the last one is always computed.
    """

    session: Session
    turn: int
    asked: float
    units: array[int]
    keys: Sequence[int]
    answer: array[int]
    more_keys: Sequence[int]
    matched: int = 0
    skipped: int = 0


@dataclass(eq=False)
class SimulatedReplica:
    """See the module; `life` is another one after each failure."""

    number: int
    capacity: int  # blocks
    life: int = 0
    computed: int = 0  # units
    is_up: bool = True
    is_computing: bool = False
    running: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    present: set[Request] = field(default_factory=set)  # waiting and running
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # cached, unused blocks, oldest first
    used: dict[int, int] = field(default_factory=dict)  # cached blocks, by how many use them
    free: int = 0

    def __post_init__(self) -> None:
        self.free = self.capacity

    def die(self) -> list[Request]:
        """Drop all blocks and return the requests that were running or waiting."""
        lost = list(self.present)
        self.life += 1
        self.is_up, self.is_computing, self.running, self.free = False, False, 0, self.capacity
        for table in (self.waiting, self.present, self.idle, self.used):
            table.clear()
        return lost

    def begin(self) -> tuple[Request, list[int]] | None:
        """The next prompt, if it can be computed now, and the blocks that are given up for it."""
        if self.is_computing or not self.waiting or self.running >= MAX_RUNNING:
            return None
        request = self.waiting[0]
        matched = self._match(request.keys)
        needed = len(request.keys) + len(request.more_keys) - matched
        if needed > self.free + len(self.idle) - sum(key in self.idle for key in request.keys[:matched]):
            return None
        self.waiting.popleft()
        self._pin(request.keys[:matched])
        gone = []
        while self.free < needed:
            gone.append(self.idle.popitem(last=False)[0])
            self.free += 1
        self.free -= needed
        request.matched, request.skipped = matched, min(matched, len(request.keys) - 1)
        self.computed += len(request.keys) - request.skipped
        self.is_computing = True
        self.running += 1
        return request, gone

    def _match(self, keys: Sequence[int]) -> int:
        used, idle = self.used, self.idle
        for i, key in enumerate(keys):
            if key not in used and key not in idle:
                return i
        return len(keys)

    def _pin(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self.idle:
                del self.idle[key]
                self.used[key] = 1
            else:
                self.used[key] += 1

    def publish(self, keys: Sequence[int]) -> int:
        """Computed blocks of a request can be found; how many of the first ones were known."""
        known = self._match(keys)
        self._pin(keys[:known])
        self.free += known
        self.used.update(dict.fromkeys(keys[known:], 1))
        return known

    def release(self, request: Request) -> None:
        """Release the blocks of an ended request; its last block is evicted first."""
        self.present.discard(request)
        self.running -= 1
        for key in (*reversed(request.more_keys), *reversed(request.keys)):
            left = self.used[key] - 1
            if left:
                self.used[key] = left
            else:
                del self.used[key]
                self.idle[key] = None
