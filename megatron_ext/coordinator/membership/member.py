"""Replica as the coordinator sees it, with the requests in flight to it."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.coordinator.membership.heartbeat import ASLEEP, FAILING, PAUSED, Heartbeat
from megatron_ext.coordinator.membership.versions import Stage, UpdateState, Version
from megatron_ext.coordinator.replica_client import Address, Call


class Status(str, enum.Enum):
    """Status of a replica."""

    JOINING = "joining"  # has not answered yet
    READY = "ready"
    DRAINING = "draining"  # gets no new requests
    ASLEEP = "asleep"
    PAUSED = "paused"  # computes nothing; requests wait there if no other replica is ready
    FAILING = "failing"  # its last step failed
    UPDATING = "updating"  # gets new weights, and no new requests
    OUTDATED = "outdated"  # has other weights than its group, and gets no new requests
    REFUSED = "refused"  # of a model that this coordinator does not serve
    SILENT = "silent"  # did not answer the last heartbeat
    DEAD = "dead"  # no heartbeat for --replica-timeout; not routed to until it answers again


class Source(str, enum.Enum):
    """Source that named a replica."""

    FLAG = "flag"
    FILE = "file"
    LAUNCH = "launch"
    ADMIN = "admin"


@dataclass(eq=False)
class Member:
    """Replica in the fleet. Times are of `time.monotonic`.

    Attributes:
        url: URL and name of the replica.
        source: Source that named the replica.
        sockets: Directory in which the replica may publish KV events; None if no coordinator made one.
        beat: Last heartbeat; None before the first.
        alive_at: Time of the last sign of life: an answer, with a step in between if a request waits for one.
        is_silent: Whether the last heartbeat failed.
        is_known: Whether the router knows the replica.
        is_draining: Whether the replica gets no new requests.
        leaves_when_idle: Whether the replica is removed once nothing is in flight to it.
        joined_at: Time at which the replica joined the router last.
        refusal: Reason why the replica may not join; empty if it may.
        is_outdated: Whether the replica has other weights than its group.
        stuck: Instance and step at which the engine was declared stuck; None if it was not.
        problem: Error of the last heartbeat that failed.
        calls: Calls in flight.
        probed: Set after the first heartbeat.
        poked: Set to request a heartbeat soon.
        update: State of the updates of its weights.
    """

    url: str
    source: Source
    sockets: Path | None = None
    beat: Heartbeat | None = None
    alive_at: float = field(default_factory=time.monotonic)
    is_silent: bool = False
    is_known: bool = False
    is_draining: bool = False
    leaves_when_idle: bool = False
    joined_at: float = 0.0
    refusal: str = ""
    is_outdated: bool = False
    stuck: tuple[str, int] | None = None
    problem: str = ""
    calls: set[Call] = field(default_factory=set)
    sent: int = 0  # requests since the replica joined
    moved: int = 0  # requests among them that were retried on another replica
    refused: int = 0  # answers that were not valid
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    poked: asyncio.Event = field(default_factory=asyncio.Event)
    update: UpdateState = field(default_factory=UpdateState)

    @property
    def address(self) -> Address:
        """Address that the replica listens on."""
        return Address.of(self.url)

    @property
    def status(self) -> Status:
        """Current status."""
        if self.beat is None:
            return Status.JOINING
        if self.refusal:
            return Status.REFUSED
        if not self.is_known:
            return Status.DEAD
        if self.is_silent:
            return Status.SILENT
        if self.is_updating:
            return Status.UPDATING
        if self.beat.status in (ASLEEP, FAILING):
            return Status(self.beat.status)
        if self.is_draining:
            return Status.DRAINING
        if self.is_outdated:
            return Status.OUTDATED
        return Status.PAUSED if self.beat.status == PAUSED else Status.READY

    @property
    def is_updating(self) -> bool:
        """True while the replica gets new weights, from this coordinator or another caller."""
        return self.update.stage is not None or (self.beat is not None and self.beat.is_updating)

    @property
    def is_draining_for_update(self) -> bool:
        """True while requests of the old weights may still end at the replica."""
        return self.update.stage is Stage.DRAINING

    @property
    def version(self) -> Version | None:
        """Version of the weights by the last heartbeat; None before the first."""
        return None if self.beat is None else Version(self.beat.weights, self.beat.weights_version)

    @property
    def is_awaited(self) -> bool:
        """True if a call waits for bytes from the replica."""
        return any(call.is_waiting for call in self.calls)

    def take_beat(self, beat: Heartbeat) -> None:
        """Record a heartbeat. It does not count as a sign of life if a call waits and no step has ended."""
        last, self.beat = self.beat, beat
        self.is_silent, self.problem = False, ""
        has_stepped = last is None or last.instance != beat.instance or last.steps != beat.steps
        is_resting = beat.status in (ASLEEP, PAUSED) or self.is_updating  # no step is due
        if has_stepped or is_resting or not self.is_awaited:
            self.alive_at = time.monotonic()
        if self.stuck is not None and (self.stuck != (beat.instance, beat.steps) or not beat.living):
            self.stuck = None

    def give_up_calls(self, reason: str, silent_since: float = float("inf")) -> None:
        """Abort calls that have received nothing since a moment; their callers get the reason."""
        for call in list(self.calls):
            if call.is_waiting and call.heard_at < silent_since:
                call.give_up(reason)
