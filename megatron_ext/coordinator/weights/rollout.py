"""One update of a group's replicas: all at once behind a barrier, or one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.heartbeat import Identity
from megatron_ext.coordinator.membership.member import Member
from megatron_ext.coordinator.membership.versions import Stage, Version
from megatron_ext.coordinator.weights.fleet_update import FleetUpdate
from megatron_ext.coordinator.weights.gate import USUAL_WAIT, Gate
from megatron_ext.coordinator.weights.replica_update import UNREACHABLE, ReplicaUpdate, Write


@dataclass(frozen=True)
class Plan:
    """Steps of an update.

    Attributes:
        update: Validated body.
        identity: Identity of the group.
        number: Number of the new weights.
        members: Replicas in the order of a rolling update: those that serve come first.
        write: Call of each replica.
    """

    update: FleetUpdate
    identity: Identity
    number: int
    members: Sequence[Member]
    write: Write


class Rollout:
    """Update of a group's replicas; see the module.

    Args:
        fleet: Fleet of the replicas.
        gate: Gate of requests.
        plan: Steps of the update.
        settle: Called with this update once at the end, before replicas take requests again.
        emptied: Called with the URL of each replica whose cache may be empty now.

    Attributes:
        plan: Steps of the update.
        replicas: Updates of the replicas, in order.
        version: Version of the replicas that have the new weights; None before the first one has them.
    """

    def __init__(
        self,
        fleet: Fleet,
        gate: Gate,
        plan: Plan,
        settle: Callable[[Rollout], None],
        emptied: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._gate = gate
        self.plan = plan
        self._settle = settle
        self._emptied = emptied
        self.replicas = [ReplicaUpdate(fleet, member, plan.write) for member in plan.members]
        self.version: Version | None = None

    async def run(self) -> None:
        """Update all replicas. However this ends, replicas with the weights of their group take requests again."""
        is_barrier = self.plan.update.rollout == "barrier"
        self._gate.max_wait = self.plan.update.max_wait_seconds
        try:
            with self._fleet.weights_update(self.plan.members):
                try:
                    await (self._all_at_once() if is_barrier else self._one_by_one())
                finally:
                    for one in self.replicas:
                        if one.stage is not Stage.UPDATED and one.stage is not Stage.FAILED:
                            one.stage = Stage.UNCHANGED
                    self._settle(self)
        finally:
            self._gate.held_group, self._gate.max_wait = None, USUAL_WAIT
            for one in self.replicas:
                one.open()
            self._gate.look()

    async def _all_at_once(self) -> None:
        self._gate.held_group = self.plan.identity.model
        for one in self.replicas:
            one.shut()
        have_drained = True
        while have_drained and not all(one.is_drained for one in self.replicas):
            # One that has drained may have got a request of a group of samples while another one drained.
            have_drained = all(await asyncio.gather(*(one.drain() for one in self.replicas)))
        if have_drained:
            await asyncio.gather(*map(self._write, self.replicas))
            versions = [one.member.version for one in self.replicas if one.stage is Stage.UPDATED]
            if versions:
                self.version = max(versions, key=versions.count)
        for one in self.replicas:
            self._compare(one)

    async def _one_by_one(self) -> None:
        """Update one replica after the other. Until one has the new weights, a failure ends the update."""
        for one in self.replicas:
            one.shut()
            if await one.drain():
                await self._write(one)
            if one.stage is Stage.UPDATED:
                self.version = self.version or one.member.version
                self._compare(one)
            if one.stage is Stage.UPDATED:
                one.open()
            elif self.version is None and one.was_serving:
                return

    async def _write(self, one: ReplicaUpdate) -> None:
        await one.write()
        self._emptied(one.member.url)

    def _compare(self, one: ReplicaUpdate) -> None:
        """Fail a replica that has found other weights than the others."""
        if one.stage is Stage.UPDATED and one.member.version != self.version:
            one.fail(
                UNREACHABLE, f"it has weights {one.member.version} under this path, and others have {self.version}"
            )
