"""One replica as the coordinator sees it, and the requests in flight to it."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field

from megatron_ext.coordinator.heartbeat import ASLEEP, FAILING, Heartbeat
from megatron_ext.coordinator.replica_client import Address, Call


class Status(str, enum.Enum):
    """How a replica is."""

    JOINING = "joining"  # has not answered yet
    READY = "ready"
    DRAINING = "draining"  # gets nothing new
    ASLEEP = "asleep"
    FAILING = "failing"  # its last step failed
    SILENT = "silent"  # did not answer when it was asked last
    DEAD = "dead"  # no sign of life for --replica-timeout; forgotten until it answers again


class Source(str, enum.Enum):
    """Who has named a replica."""

    FLAG = "flag"
    FILE = "file"
    LAUNCH = "launch"
    ADMIN = "admin"


@dataclass(eq=False)
class Member:
    """One replica. Times are of `time.monotonic`.

    Attributes:
        url: Its name, too.
        source: Who has named it.
        beat: Its last answer; None before the first.
        alive_at: When it gave its last sign of life: an answer, and a step if anybody waits for one.
        is_silent: Whether it did not answer when it was asked last.
        is_known: Whether the router has it.
        is_draining: Whether it gets nothing new.
        leaves_when_idle: Whether it goes when nothing is in flight to it.
        stuck: Instance and step at which its engine was given up; None if it was not.
        problem: Of the last answer that did not come.
        calls: In flight.
        probed: Set when it has been asked for the first time.
        poked: Set for it to be asked soon.
    """

    url: str
    source: Source
    beat: Heartbeat | None = None
    alive_at: float = field(default_factory=time.monotonic)
    is_silent: bool = False
    is_known: bool = False
    is_draining: bool = False
    leaves_when_idle: bool = False
    stuck: tuple[str, int] | None = None
    problem: str = ""
    calls: set[Call] = field(default_factory=set)
    sent: int = 0  # requests, since it is here
    moved: int = 0  # of those, that went elsewhere after all
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    poked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return Address.of(self.url)

    @property
    def status(self) -> Status:
        """How it is."""
        if self.beat is None:
            return Status.JOINING
        if not self.is_known:
            return Status.DEAD
        if self.is_silent:
            return Status.SILENT
        if self.beat.status in (ASLEEP, FAILING):
            return Status(self.beat.status)
        return Status.DRAINING if self.is_draining else Status.READY

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for bytes of it."""
        return any(call.is_waiting for call in self.calls)

    def take_beat(self, beat: Heartbeat) -> None:
        """It has answered. That alone is no sign of life of its engine where somebody waits and no step has ended."""
        last, self.beat = self.beat, beat
        self.is_silent, self.problem = False, ""
        has_stepped = last is None or last.instance != beat.instance or last.steps != beat.steps
        if has_stepped or beat.status == ASLEEP or not self.is_awaited:
            self.alive_at = time.monotonic()
        if self.stuck is not None and (self.stuck != (beat.instance, beat.steps) or not beat.living):
            self.stuck = None

    def give_up_calls(self, reason: str, silent_since: float = float("inf")) -> None:
        """End calls that nothing has been heard of since then; those who wait for them are told why."""
        for call in list(self.calls):
            if call.is_waiting and call.heard_at < silent_since:
                call.give_up(reason)
