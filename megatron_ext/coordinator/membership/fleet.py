"""Fleet of replicas: membership, heartbeats, and the updates of the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_ext.config.fleet_limits import STATUS_BYTES
from megatron_ext.coordinator.membership.groups import Groups
from megatron_ext.coordinator.membership.heartbeat import OK, PATH, PAUSED, BadHeartbeat, EventPlaces, Heartbeat
from megatron_ext.coordinator.membership.member import Member, Source, Status
from megatron_ext.coordinator.membership.versions import Stage, Version
from megatron_ext.coordinator.replica_client import BadAnswer, CallFailed, fetch
from megatron_ext.coordinator.supervision import Supervisor, within
from megatron_ext.routing.router import Router
from megatron_ext.server.http.request_parts import SENDER_HEADER
from megatron_ext.server.openai.responses_api.response_ids import tag_of

logger = logging.getLogger(__name__)

BEATS = 4  # heartbeats in `--replica-timeout`
LONGEST_INTERVAL = 1.0  # seconds between two heartbeats
OTHER_WEIGHTS = "its weights have another version than those of its group"
LONGEST_PROBE = 2.0  # seconds for the answer to a heartbeat; a replica that takes longer is avoided


class Fleet:
    """All replicas; see the module. All methods run on one event loop.

    Args:
        router: Router that is told of joining and leaving replicas.
        timeout: Seconds without a sign of life after which a replica is dead.
        supervisor: Supervisor of the heartbeats' tasks.
        allowed_event_sources: Places besides a replica's own host where it may publish KV events.
        models: Served names that replicas may have; empty: that of the first replica.
    """

    def __init__(
        self,
        router: Router,
        timeout: float,
        supervisor: Supervisor | None = None,
        allowed_event_sources: tuple[str, ...] = (),
        models: tuple[str, ...] = (),
    ) -> None:
        self.router = router
        self.timeout = timeout
        self._supervisor = supervisor or Supervisor()
        self._allowed_event_sources = allowed_event_sources
        self.members: dict[str, Member] = {}
        self.groups = Groups(self.members, models)
        self.on_join: Callable[[Member], None] = lambda member: None  # added to the router
        self.on_leave: Callable[[Member], None] = lambda member: None  # removed from the router
        self.on_removed: Callable[[Member], None] = lambda member: None  # removed from the fleet
        # Other weights than in the last heartbeat of the same process, which are given; before they are compared.
        self.on_other_weights: Callable[[Member, Version], None] = lambda member, before: None
        self.on_outdated: Callable[[Member], None] = lambda member: None  # at each heartbeat
        self.on_change: Callable[[], None] = lambda: None  # a replica may take requests, or no longer
        self.sender = (SENDER_HEADER.encode(), uuid.uuid4().hex.encode())  # header of calls to replicas
        self.in_flight: set[int] = set()  # numbers of the requests in the router
        self._interval = min(LONGEST_INTERVAL, timeout / BEATS)
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    # Membership

    def add(self, url: str, source: Source, sockets: Path | None = None) -> Member:
        """Add a replica, or cancel its removal if it is about to leave.

        Args:
            url: URL of the replica.
            source: Source that named it.
            sockets: Directory in which it may publish KV events, made by the coordinator that launched it.
        """
        member = self.members.get(url)
        if member is None:
            logger.info("replica %s is being added (%s)", url, source.value)
            member = self.members[url] = Member(url, source, sockets)
            self._tasks[url] = [
                self._supervisor.start("heartbeats", url, lambda: self._watch(member)),
                self._supervisor.start("signs of life", url, lambda: self._sweep(member)),
            ]
        member.leaves_when_idle = False
        if member.is_draining:
            self.drain(url, is_draining=False)
        return member

    def drain(self, url: str, *, is_draining: bool = True, leaves: bool = False) -> None:
        """Stop or resume new requests; with `leaves`, remove the replica once its requests in flight have ended."""
        member = self.members[url]
        logger.info("replica %s %s", url, "drains" if is_draining else "accepts requests again")
        member.is_draining, member.leaves_when_idle = is_draining, leaves
        self._tell_router(member)
        if leaves and not member.calls:
            self.remove(url)

    def remove(self, url: str) -> None:
        """Remove a replica: its requests in flight are retried elsewhere, or end."""
        member = self.members.pop(url)
        logger.info("replica %s leaves", url)
        for task in self._tasks.pop(url):
            task.cancel()
        self._forget(member, "the replica was removed")
        self.on_removed(member)

    def ended(self, member: Member) -> None:
        """Note the end of a call to a replica, which may then leave."""
        member.update.call_ended.set()
        if member.leaves_when_idle and not member.calls and self.members.get(member.url) is member:
            self.remove(member.url)

    def ready(self) -> list[Member]:
        """Replicas that take requests, though paused ones compute nothing."""
        return [member for member in self.members.values() if member.status in (Status.READY, Status.PAUSED)]

    def answering(self) -> list[Member]:
        """Replicas that answer calls other than generation."""
        silent = (Status.JOINING, Status.REFUSED, Status.SILENT, Status.DEAD)
        return [member for member in self.members.values() if member.status not in silent]

    def known(self) -> list[Member]:
        """Replicas in the router, those included that take no requests now."""
        return [member for member in self.members.values() if member.is_known]

    def is_known(self, url: str) -> bool:
        """Return whether a replica is in the router."""
        return url in self.members and self.members[url].is_known

    def owner(self, tag: str | None) -> Member | None:
        """Return the replica whose stored responses have a tag in their ids; None if it has left or is dead."""
        known = [(member, member.beat) for member in self.members.values() if member.is_known]
        return next((one for one, beat in known if beat is not None and tag_of(beat.instance) == tag), None)

    def doubtful(self) -> list[str]:
        """URLs of replicas to be avoided: their last heartbeat failed, or they are paused."""
        return [url for url, member in self.members.items() if member.is_silent or member.status is Status.PAUSED]

    async def close(self) -> None:
        """Stop all heartbeats."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def first_look(self) -> None:
        """Wait until each current replica has been probed once."""
        await _probed(self.members.values())

    # Heartbeats

    async def _watch(self, member: Member) -> None:
        """Send heartbeats to a replica until it is removed."""
        while True:
            member.poked.clear()
            try:
                await self._probe(member)
            except Exception:
                self.note_silence(member, "its heartbeat could not be processed")
                raise
            finally:
                member.probed.set()
            try:
                await within(self._interval, member.poked.wait())
            except asyncio.TimeoutError:
                continue
            await asyncio.sleep(self._interval / BEATS)  # repeated pokes must not cause heartbeats without a pause

    async def _probe(self, member: Member) -> None:
        address, patience = member.address, min(LONGEST_PROBE, self.timeout / 2)
        places = EventPlaces(address.host, self._allowed_event_sources, member.sockets)
        try:
            answer = await fetch(address, "GET", PATH, [self.sender], patience=patience, limit=STATUS_BYTES)
            if answer.status != 200:
                raise BadHeartbeat(f"GET {PATH} is answered with status {answer.status}")
            beat = Heartbeat.of(answer.json(), places)
        except (CallFailed, BadHeartbeat) as error:
            member.refused += isinstance(error, BadHeartbeat | BadAnswer)
            self.note_silence(member, str(error))
            return
        self._note_beat(member, beat)

    def note_silence(self, member: Member, problem: str) -> None:
        """Note a failed heartbeat: the replica is avoided, and probed again soon."""
        if problem != member.problem:
            logger.warning("replica %s: %s", member.url, problem)
        member.problem, member.is_silent = problem, True

    def note_bad_answer(self, member: Member, error: BadAnswer) -> None:
        """Log and count an answer that cannot be used; the replica is alive."""
        member.refused += 1
        logger.warning("replica %s: %s", member.url, error)

    def _note_beat(self, member: Member, beat: Heartbeat) -> None:
        if member.beat is not None and member.beat.instance != beat.instance:
            self._note_restart(member)
        self._note_problems(member, beat)
        if member.refusal:
            self._forget(member, "the replica serves another model")
        is_same = member.beat is not None and member.beat.instance == beat.instance
        before = member.version
        member.take_beat(beat)
        if is_same and before is not None and before != member.version:
            self.on_other_weights(member, before)
        if not (member.is_known or member.refusal or member.stuck):
            self._join(member, beat)
        self.weigh()
        if member.is_outdated:
            self.on_outdated(member)
        self._tell_router(member)
        if member.is_known:
            others = beat.other_requests, beat.other_prompt_tokens, beat.other_output_tokens
            self.router.note_others(member.url, *others)

    def _note_restart(self, member: Member) -> None:
        """Note that another process answers: requests in flight are lost, and it takes new ones."""
        if member.is_known:
            logger.warning("replica %s has been restarted", member.url)
            self._forget(member, "the replica was restarted")
        if member.is_draining and not member.leaves_when_idle:
            logger.info("replica %s takes requests again, as another process", member.url)
            member.is_draining = False

    def _note_problems(self, member: Member, beat: Heartbeat) -> None:
        """Log, when they change, and count why a replica may not join, or why its events are not read."""
        before, member.refusal = member.refusal, self.groups.refusal(member, beat.identity)
        if member.refusal and member.refusal != before:
            logger.error("replica %s is refused: %s", member.url, member.refusal)
        before = "" if member.beat is None else member.beat.events_problem
        if beat.events_problem and beat.events_problem != before:
            logger.warning("replica %s: its KV events are not read: %s", member.url, beat.events_problem)
        member.refused += bool(member.refusal) + bool(beat.events_problem)

    def _join(self, member: Member, beat: Heartbeat) -> None:
        self.router.join(member.url, beat.block_size, has_states=beat.has_known_states, slots=beat.capacity)
        member.is_known, member.joined_at = True, time.monotonic()
        logger.info(
            "replica %s has joined: %s, weights %s, blocks of %d tokens",
            *(member.url, beat.identity, beat.weights, beat.block_size),
        )
        self.on_join(member)

    @contextlib.contextmanager
    def weights_update(self, members: Iterable[Member]) -> Iterator[None]:
        """Announce an update of replicas' weights: meanwhile these may have others than their group."""
        self.groups.updating = frozenset(member.beat.instance for member in members if member.beat is not None)
        try:
            yield
        finally:
            self.groups.updating = frozenset()
            self.weigh()

    def weigh(self) -> None:
        """Compare the replicas' weights: those with other ones than their group get no new requests."""
        for changed in self.groups.weigh():
            if changed.is_outdated:
                logger.warning("replica %s drains: %s", changed.url, OTHER_WEIGHTS)
            self._tell_router(changed)

    def set_stage(self, member: Member, stage: Stage | None) -> None:
        """Note how far the update of a replica's weights is; it takes new requests at no stage."""
        member.update.stage = stage
        self._tell_router(member)

    async def look_after(self, member: Member) -> None:
        """Wait for an answer that a replica gives from now on: an earlier one may be under way."""
        for _ in range(2):
            await self.look_again((member,))

    async def look_again(self, members: Iterable[Member] | None = None) -> None:
        """Probe these replicas now, or all, and wait for their answers."""
        members = list(self.members.values() if members is None else members)
        for member in members:
            member.probed.clear()
            member.poked.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await within(2 * LONGEST_PROBE, _probed(members))

    def _tell_router(self, member: Member) -> None:
        if member.is_known:
            is_shut = member.is_draining or member.is_outdated or member.is_updating
            is_open = member.beat is not None and member.beat.status in (OK, PAUSED) and not is_shut
            self.router.drain(member.url, is_draining=not is_open)
        self.on_change()

    async def _sweep(self, member: Member) -> None:
        """Detect missing signs of life; calls in flight that still deliver bytes continue."""
        pause = self._interval / BEATS
        while True:
            began = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            late = now - began - pause
            if late > pause:  # the coordinator itself was late, and could not read heartbeats
                member.alive_at = min(member.alive_at + late, now)
            latest = now - self.timeout
            if member.alive_at < latest and member.beat is not None:
                reason = f"no heartbeat for {self.timeout:g} s"
                if member.is_known:
                    logger.error("replica %s is dead: %s", member.url, reason)
                    member.stuck = None if member.is_silent else (member.beat.instance, member.beat.steps)
                    member.problem = reason
                    self._leave_router(member)
                member.give_up_calls(reason, latest)

    def _forget(self, member: Member, reason: str) -> None:
        """Remove a replica from the router after its process has died or restarted."""
        self._leave_router(member)
        member.give_up_calls(reason)

    def _leave_router(self, member: Member) -> None:
        if member.is_known:
            member.is_known = False
            self.in_flight.difference_update(self.router.leave(member.url))
            self.on_leave(member)
            self.on_change()


async def _probed(members: Iterable[Member]) -> None:
    await asyncio.gather(*(member.probed.wait() for member in members))
