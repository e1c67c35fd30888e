"""Updates of a fleet's weights, one at a time, and of replicas that join or return with other ones."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Member
from megatron_ext.coordinator.membership.versions import Stage, Target, Version
from megatron_ext.coordinator.replica_client import BadAnswer, CallFailed, CompleteAnswer, Headers, fetch, not_json
from megatron_ext.coordinator.retries import bad_answer, no_replica
from megatron_ext.coordinator.weights.fleet_update import FleetUpdate
from megatron_ext.coordinator.weights.gate import Gate
from megatron_ext.coordinator.weights.replica_update import SERVING, UNREACHABLE, ReplicaUpdate, Write
from megatron_ext.coordinator.weights.rollout import Plan, Rollout
from megatron_ext.server.api_errors import FAULT, ApiError
from megatron_ext.server.log import printable

logger = logging.getLogger(__name__)

_LONGEST_PATH = 500  # characters, in the log
_PROBE = "/is_paused"  # a route of administrators that changes nothing


class Refused(Exception):
    """Answer of a replica that refuses the caller, to be passed on."""

    def __init__(self, answer: CompleteAnswer) -> None:
        super().__init__()
        self.answer = answer


class WeightUpdates:
    """Updates of a fleet's weights; see the module. All methods run on one event loop.

    Args:
        fleet: All replicas.
        gate: Gate of requests.
        emptied: Called with the URL of each replica whose cache may be empty now.
        patience: Seconds for the answer to a question.
    """

    def __init__(self, fleet: Fleet, gate: Gate, emptied: Callable[[str], None], patience: float) -> None:
        self._fleet = fleet
        self._gate = gate
        self._emptied = emptied
        self._patience = patience
        self._is_busy = self._is_closed = False
        self._rollout: Rollout | None = None  # the running one, or the last
        self._running: asyncio.Task[Rollout] | None = None
        self._offers: dict[str, asyncio.Task[None]] = {}  # by URL
        fleet.on_outdated, fleet.on_other_weights = self._offer, self._updated_elsewhere

    async def run(self, update: FleetUpdate, headers: Headers) -> Rollout:
        """Update a group's replicas. The update goes on if this call is cancelled.

        Args:
            update: Validated body.
            headers: Headers for the replicas, with the caller's key.

        Raises:
            ApiError: 409 while another update is under way; 503 if no replica answers, or the coordinator stops; see
                also `Groups.resolve`.
            Refused: A replica refuses the caller.
        """
        self._check_free(update)
        self._is_busy = True
        try:
            plan = await self._plan(update, headers)
            self._running = asyncio.get_running_loop().create_task(self._roll_out(plan))
        finally:
            self._is_busy = self._running is not None
        running = self._running
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                message = "the coordinator stops in the middle of the update; repeat the call at the next one"
                raise ApiError(503, message, kind=FAULT, code="update_interrupted") from None
            raise

    async def close(self) -> None:
        """Cancel what is under way; replicas finish what they have been asked for."""
        self._is_closed = True
        tasks = [task for task in (self._running, *self._offers.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def describe(self) -> dict[str, object] | None:
        """Return the running update, or the last one; None before the first."""
        if self._rollout is None:
            return None
        plan = self._rollout.plan
        return {
            "is_running": self._running is not None,
            "rollout": plan.update.rollout,
            "model_path": plan.update.model_path,
            "weights_version": plan.number,
            "replicas": {one.member.url: one.stage.value for one in self._rollout.replicas},
        }

    def _check_free(self, update: FleetUpdate) -> None:
        if self._is_busy:
            last = "" if self._rollout is None else f" to {self._rollout.plan.update.model_path}"
            raise _under_way(f"an update{last} is under way at this coordinator")
        group = self._fleet.groups.resolve(update.model)
        for member in self._fleet.groups.members(group, self._fleet.members.values()):
            if member.beat is not None and member.beat.is_updating and member.url not in self._offers:
                raise _under_way(f"replica {member.url} is being updated by another coordinator or client")

    async def _plan(self, update: FleetUpdate, headers: Headers) -> Plan:
        group = self._fleet.groups.resolve(update.model)
        members = await self._reachable(self._fleet.groups.members(group, self._fleet.known()), headers)
        beats = [member.beat for member in members if member.beat is not None]
        known = [beat.weights_version for beat in beats if beat.weights_version is not None]
        number = update.weights_version
        number = 1 + max(known, default=0) if number is None else number
        write = Write(
            number=number,
            body=update.for_replicas(number),
            headers=[*headers, self._fleet.sender],
            drains=update.in_flight == "finish",
            drain_seconds=update.drain_seconds,
            seconds=update.update_seconds,
        )
        members.sort(key=lambda member: member.status not in SERVING)
        return Plan(update, beats[0].identity, number, members, write)

    async def _reachable(self, members: list[Member], headers: Headers) -> list[Member]:
        """Return the replicas that answer and admit the caller to routes of administrators.

        Raises:
            ApiError: No replica answers.
            Refused: A replica does not admit the caller.
        """
        found, bad = [], None
        asked = [fetch(one.address, "GET", _PROBE, headers, patience=self._patience) for one in members]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, CompleteAnswer) and not answer.is_json:
                answer = not_json(answer)
            if isinstance(answer, CompleteAnswer):
                if answer.status != 200:
                    raise Refused(answer)
                found.append(member)
            elif isinstance(answer, BadAnswer):
                self._fleet.note_bad_answer(member, answer)
                bad = bad_answer(answer)
            elif isinstance(answer, CallFailed):
                self._fleet.note_silence(member, str(answer))
            else:
                raise answer
        if not found:
            raise no_replica() if bad is None else bad
        return found

    async def _roll_out(self, plan: Plan) -> Rollout:
        update = plan.update
        words = update.rollout, printable(update.model_path, _LONGEST_PATH), plan.number, len(plan.members)
        logger.info("%s update to %s (weights version %d) of %d replicas begins", *words)
        rollout = Rollout(self._fleet, self._gate, plan, self._settle, self._emptied)
        self._rollout = rollout
        try:
            await self._withdraw_offers()
            await rollout.run()
        finally:
            self._running, self._is_busy = None, False
            stages = ", ".join(f"{one.member.url} {one.stage.value}" for one in rollout.replicas)
            logger.info("the update to weights version %d has ended: %s", plan.number, stages)
        return rollout

    def _settle(self, rollout: Rollout) -> None:
        """Note the weights that the group is to have from now on; those that failed are not asked again."""
        plan, version = rollout.plan, rollout.version
        if version is not None:
            identity, update = plan.identity, plan.update
            target = Target(
                *(identity, version, update.model_path),
                *(plan.write.body, plan.write.headers, update.update_seconds),
            )
            self._fleet.groups.targets[identity.model] = target
            for one in rollout.replicas:
                if one.stage is Stage.FAILED and one.member.beat is not None:
                    one.member.update.offered = (one.member.beat.instance, version)

    # Replicas with other weights than their group

    def _offer(self, member: Member) -> None:
        """Update a replica that has joined or returned with other weights, once."""
        beat, busy = member.beat, self._is_busy or self._is_closed or member.is_updating
        target = None if beat is None else self._fleet.groups.target(beat)
        if beat is None or target is None or busy or member.update.offered == (beat.instance, target.version):
            return
        member.update.offered = (beat.instance, target.version)
        logger.info("replica %s gets the weights of its group: version %s", member.url, target.version)
        task = asyncio.get_running_loop().create_task(self._catch_up(member, target))
        self._offers[member.url] = task
        task.add_done_callback(lambda _: self._offers.pop(member.url, None))

    async def _catch_up(self, member: Member, target: Target) -> None:
        number = target.version.number
        write = Write(
            number=0 if number is None else number,
            body=target.body,
            headers=target.headers,
            drains=True,
            drain_seconds=target.seconds,
            seconds=target.seconds,
        )
        one = ReplicaUpdate(self._fleet, member, write)
        try:
            one.shut()
            if await one.drain():
                await one.write()
                self._emptied(member.url)
            if one.stage is Stage.UPDATED and member.version != target.version:
                one.fail(UNREACHABLE, f"it has weights {member.version} under this path, and others {target.version}")
        finally:
            self._fleet.weigh()
            one.open()

    async def _withdraw_offers(self) -> None:
        tasks = list(self._offers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _updated_elsewhere(self, member: Member, before: Version) -> None:
        """Note that a replica has other weights, which this coordinator may not have asked for."""
        if self._is_busy or member.update.stage is not None or member.beat is None:
            return
        target = self._fleet.groups.target(member.beat)
        if target is not None and target.version == before:
            del self._fleet.groups.targets[member.beat.model]
            logger.warning(
                "replica %s got weights %s from elsewhere: what most replicas of its group have counts again",
                *(member.url, member.version),
            )

    def summary(self) -> dict[str, int]:
        """Return the number of replicas by the number of their weights, as far as they say it."""
        versions = (member.version for member in self._fleet.known())
        return dict(Counter(str(one.number) for one in versions if one is not None and one.number is not None))


def _under_way(problem: str) -> ApiError:
    message = f"{problem}; GET /replicas shows it. Repeat the call when it has ended"
    return ApiError(409, message, code="update_under_way")
