"""Shared state of a coordinator's routes: the fleet, the router, metrics, and event readers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import Depends, Request

from megatron_ext.config.coordinator import CoordinatorConfig
from megatron_ext.config.routing import RoutingPolicyName
from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex
from megatron_ext.coordinator.events.event_reader import EventReader
from megatron_ext.coordinator.forwarding import Forwarder
from megatron_ext.coordinator.membership.fleet import OTHER_WEIGHTS, Fleet
from megatron_ext.coordinator.membership.member import Member, Source
from megatron_ext.coordinator.membership.replicas_file import ReplicasFile
from megatron_ext.coordinator.metrics import FleetMetrics
from megatron_ext.coordinator.prompt_tokens import Prompts
from megatron_ext.coordinator.replica_client import BadAnswer, CallFailed, CompleteAnswer, Headers, fetch, not_json
from megatron_ext.coordinator.retries import bad_answer, no_replica
from megatron_ext.coordinator.supervision import Supervisor
from megatron_ext.coordinator.weights.gate import Gate
from megatron_ext.coordinator.weights.updates import WeightUpdates
from megatron_ext.routing.router import ReplicaView, Router
from megatron_ext.server.api_keys import Keys, load_keys

logger = logging.getLogger(__name__)

BROADCAST_TIMEOUT = 60.0  # seconds for a call to all replicas: a reset waits for a step, a wake-up for memory


@dataclass(frozen=True)
class ReplicaRow:
    """Row of one replica in the status page."""

    url: str
    source: str
    status: str
    problem: str
    model: str | None
    configuration: str | None
    tokenizer: str | None
    weights: str | None
    weights_version: int | None
    in_flight: int
    load_tokens: int
    blocks: int
    blocks_known: int
    states_known: int
    has_events: bool
    sent: int
    moved: int
    skipped: int | None
    computed: int | None
    decision_seconds: float | None
    quiet_seconds: float


class Coordination:
    """Shared state of the routes; see the module.

    Args:
        settings: Settings of the coordinator.
        keys: API keys; by default those that the settings name.

    Raises:
        ConfigError: Keys or replicas cannot be read from the files in the settings.
    """

    def __init__(self, settings: CoordinatorConfig, keys: Keys | None = None) -> None:
        self.settings = settings
        self.keys = keys or load_keys(settings)
        self.router = Router(settings.routing)
        self.supervisor = Supervisor()
        self.fleet = Fleet(
            *(self.router, settings.replica_timeout, self.supervisor),
            *(settings.allowed_event_sources, settings.model),
        )
        self.metrics = FleetMetrics(self.fleet, self.supervisor)
        self.gate = Gate(self.fleet)
        self.fleet.on_change = self.gate.look
        self.updates = WeightUpdates(self.fleet, self.gate, self.cache_cleared, settings.replica_timeout)
        self._prefix_index: dict[str, ApproximatePrefixIndex] = {}
        self._readers: dict[str, EventReader] = {}
        self.fleet.on_join, self.fleet.on_leave = self._joined, self._left
        self.fleet.on_removed = lambda member: self.metrics.forget(member.url)
        needs_tokens = settings.routing.policy != RoutingPolicyName.ROUND_ROBIN.value
        self.prompts = Prompts(self.fleet, needs_tokens=needs_tokens, has_keys=self.keys.are_needed)
        self.forwarder = Forwarder(self.fleet, self.metrics, self._prefix_index, self.gate)
        file = settings.replicas_file
        self._file = None if file is None else ReplicasFile(file, self.fleet)
        self._watching: asyncio.Task[None] | None = None

    def _joined(self, member: Member) -> None:
        """Track the cache of a new replica: by its events, or by its answers."""
        beat = member.beat
        assert beat is not None, "it has answered"
        if beat.events:
            self._readers[member.url] = EventReader(
                self.router,
                member.url,
                beat.events,
                beat.block_size,
                beat.blocks,
                lambda: self.metrics.event_fault(member.url),
            )
        else:
            self._prefix_index[member.url] = ApproximatePrefixIndex(
                self.router, member.url, beat.block_size, beat.blocks, has_states=beat.has_states
            )

    def _left(self, member: Member) -> None:
        self._prefix_index.pop(member.url, None)
        reader = self._readers.pop(member.url, None)
        if reader is not None:
            reader.close()

    def start(self) -> None:
        """Add the replicas that the flags name; runs on the event loop."""
        for url in self.settings.replica:
            self.fleet.add(url, Source.FLAG)
        if self._file is not None:
            self._file.join()
            self._watching = self.supervisor.start("replicas file", str(self.settings.replicas_file), self._file.run)

    async def close(self) -> None:
        """Stop all heartbeats and event readers."""
        if self._watching is not None:
            self._watching.cancel()
        await self.updates.close()
        await self.fleet.close()
        for reader in self._readers.values():
            reader.close()

    def cache_cleared(self, url: str) -> None:
        """Note that a replica has emptied its cache; a replica with events publishes this itself."""
        if url in self._prefix_index:
            self._prefix_index[url].cleared()

    async def ask_any(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        group: str | None = None,
        owner: Member | None = None,
    ) -> CompleteAnswer:
        """Return the answer of the first replica of a group, or of all, that answers with JSON; or that of the owner.

        Raises:
            ApiError: 503 if no replica answers, 502 if what they answer is not JSON.
        """
        found: BadAnswer | None = None
        members = [owner] if owner is not None else self.fleet.groups.members(group, self.fleet.answering())
        for member in sorted(members, key=lambda one: len(one.calls)):
            bad = None
            try:
                answer = await fetch(
                    member.address, method, target, headers, body, patience=self.settings.replica_timeout
                )
            except BadAnswer as error:
                bad = error
            except CallFailed as error:
                self.fleet.note_silence(member, str(error))
            else:
                if answer.is_json:
                    return answer
                bad = not_json(answer)
            if bad is not None:
                found = bad
                self.fleet.note_bad_answer(member, bad)
        raise no_replica() if found is None else bad_answer(found)

    async def broadcast(
        self, method: str, target: str, headers: Headers, body: bytes
    ) -> dict[str, CompleteAnswer | CallFailed]:
        """Return the answers of all replicas that can be called, by URL.

        Raises:
            ApiError: There is no such replica.
        """
        members = self.fleet.answering()
        if not members:
            raise no_replica()

        async def ask(member: Member) -> CompleteAnswer | CallFailed:
            try:
                answer = await fetch(member.address, method, target, headers, body, patience=BROADCAST_TIMEOUT)
            except CallFailed as error:
                return error
            return answer if answer.is_json else not_json(answer)

        answers: Sequence[CompleteAnswer | CallFailed] = await asyncio.gather(*map(ask, members))
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, BadAnswer):
                self.fleet.note_bad_answer(member, answer)
        return {member.url: answer for member, answer in zip(members, answers, strict=True)}

    def rows(self) -> list[dict[str, object]]:
        """Return the rows of all replicas for the status page."""
        views = {view.name: view for view in self.router.replicas()}
        return [asdict(self._row(member, views.get(url))) for url, member in self.fleet.members.items()]

    def _row(self, member: Member, view: ReplicaView | None) -> ReplicaRow:
        beat = member.beat
        return ReplicaRow(
            url=member.url,
            source=member.source.value,
            status=member.status.value,
            problem=_problem(member),
            model=None if beat is None else beat.model,
            configuration=None if beat is None else beat.identity.configuration,
            tokenizer=None if beat is None else beat.identity.tokenizer,
            weights=None if beat is None else beat.weights,
            weights_version=None if beat is None else beat.weights_version,
            in_flight=len(member.calls),
            load_tokens=0 if view is None else view.load,
            blocks=0 if beat is None else beat.blocks,
            blocks_known=0 if view is None else view.blocks,
            states_known=0 if view is None else view.states,
            has_events=member.url in self._readers,
            sent=member.sent,
            moved=member.moved,
            skipped=None if beat is None else beat.skipped,
            computed=None if beat is None else beat.computed,
            decision_seconds=self.metrics.decision_seconds(member.url),
            quiet_seconds=time.monotonic() - member.alive_at,
        )


def _problem(member: Member) -> str:
    if member.problem or member.refusal:
        return member.problem or member.refusal
    if member.is_outdated:
        failure = member.update.problem
        return f"{OTHER_WEIGHTS}; the update failed: {failure}" if failure else OTHER_WEIGHTS
    return "" if member.beat is None else member.beat.events_problem


async def _coordination(request: Request) -> Coordination:
    return request.app.state.coordination


CoordinationDependency = Annotated[Coordination, Depends(_coordination)]
