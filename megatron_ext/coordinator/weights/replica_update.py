"""Update of one replica's weights: requests in flight end, the weights are written, and the heartbeat confirms them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Member, Status
from megatron_ext.coordinator.membership.versions import Stage
from megatron_ext.coordinator.replica_client import CallFailed, CompleteAnswer, Headers, fetch
from megatron_ext.coordinator.supervision import within
from megatron_ext.server.log import printable

logger = logging.getLogger(__name__)

PATH = "/update_weights_from_disk"
UNREACHABLE, TIMED_OUT = 502, 504
SERVING = (Status.READY, Status.PAUSED, Status.SILENT)  # silent: the last heartbeat alone was late
_LONGEST_PROBLEM = 300  # characters of a replica's message


@dataclass(frozen=True)
class Write:
    """Call that writes new weights.

    Attributes:
        number: Number of the new weights.
        body: Body of the call.
        headers: Headers of the call.
        drains: Whether requests in flight end first.
        drain_seconds: Seconds for them to end.
        seconds: Seconds for the replica's answer.
    """

    number: int
    body: bytes
    headers: Headers
    drains: bool
    drain_seconds: float
    seconds: float


class ReplicaUpdate:
    """Update of one replica; it gets no new requests from `shut` to `open`.

    Args:
        fleet: Fleet of the replica.
        member: Replica to be updated.
        write: Call that writes the weights.

    Attributes:
        stage: Current stage.
        status: HTTP status of the replica; 502 without an answer, 504 if requests in flight do not end, 0 at first.
        answer: Answer of the replica; None without one.
        problem: Reason for the failure; empty without one.
        was_serving: Whether the replica took requests before.
    """

    def __init__(self, fleet: Fleet, member: Member, write: Write) -> None:
        self._fleet = fleet
        self.member = member
        self._write_call = write
        self.stage = Stage.WAITING
        self.status = 0
        self.answer: CompleteAnswer | None = None
        self.problem = ""
        self.was_serving = member.status in SERVING
        self._until = 0.0

    @property
    def is_member(self) -> bool:
        """True unless the replica has been removed meanwhile."""
        return self._fleet.members.get(self.member.url) is self.member

    @property
    def content(self) -> object:
        """Answer of the replica, or an error object."""
        found = None if self.answer is None else self.answer.json()
        return {"error": {"message": self.problem}} if found is None else found

    def shut(self) -> None:
        """Send the replica no more requests."""
        self._note(Stage.DRAINING)
        self._until = time.monotonic() + self._write_call.drain_seconds

    def open(self) -> None:
        """Let the replica take requests again, if its weights are those of its group."""
        self._fleet.set_stage(self.member, None)

    @property
    def is_drained(self) -> bool:
        """True if nothing is in flight to the replica that is to end first."""
        return not (self._write_call.drains and self.member.calls)

    async def drain(self) -> bool:
        """Wait until requests in flight have ended, if they are to finish; return whether they have."""
        while not self.is_drained:
            self.member.update.call_ended.clear()
            try:
                await within(max(0.0, self._until - time.monotonic()), self.member.update.call_ended.wait())
            except asyncio.TimeoutError:
                count, seconds = len(self.member.calls), self._write_call.drain_seconds
                self.fail(
                    TIMED_OUT, f"{count} requests in flight did not end in {seconds:g} s; its weights are unchanged"
                )
                return False
        return True

    async def write(self) -> None:
        """Write the weights, and wait for a heartbeat that confirms them."""
        self._note(Stage.WRITING)
        member, write = self.member, self._write_call
        member.update.problem = ""
        if not self.is_member:
            self.fail(UNREACHABLE, "the replica was removed")
            return
        try:
            answer = await fetch(member.address, "POST", PATH, write.headers, write.body, patience=write.seconds)
        except CallFailed as error:
            self.fail(UNREACHABLE, str(error))
        else:
            self.status, self.answer = answer.status, answer if answer.is_json else None
        await self._confirm()
        if not self.problem:
            self._judge()

    async def _confirm(self) -> None:
        """Wait for a heartbeat from after the call; one of a busy replica may be late."""
        until = time.monotonic() + self._fleet.timeout
        await self._fleet.look_after(self.member)
        while self.is_member and self.member.is_silent and self.member.is_known and time.monotonic() < until:
            await self._fleet.look_again((self.member,))

    def _judge(self) -> None:
        beat = self.member.beat
        if self.answer is None:
            self.fail(UNREACHABLE, "its answer is not JSON")
        elif self.status != 200:
            self.fail(self.status, _message(self.content))
        elif self.member.is_silent or beat is None:
            self.fail(UNREACHABLE, self.member.problem or "it does not answer any more")
        elif beat.weights_version not in (None, self._write_call.number):
            self.fail(UNREACHABLE, f"it reports weights version {beat.weights_version}")
        else:
            self._note(Stage.UPDATED)

    def fail(self, status: int, problem: str) -> None:
        """Note why the update failed; the replica stays shut."""
        self.status, self.problem = status, problem
        self.member.update.problem = problem
        self.stage = Stage.FAILED
        logger.error("replica %s has not got weights version %d: %s", self.member.url, self._write_call.number, problem)

    def _note(self, stage: Stage) -> None:
        self.stage = stage
        self._fleet.set_stage(self.member, Stage.WRITING if stage is Stage.UPDATED else stage)


def _message(content: object) -> str:
    """Return the message of an error object."""
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return printable(str(message or "it refuses"), _LONGEST_PROBLEM)
