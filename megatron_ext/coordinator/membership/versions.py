"""Versions of the weights that replicas have, and the update that decides which one a group's replicas are to have."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from megatron_ext.coordinator.membership.heartbeat import Identity
from megatron_ext.coordinator.replica_client import Headers


@dataclass(frozen=True)
class Version:
    """Version of a replica's weights.

    Attributes:
        weights: Hash of the checkpoint.
        number: Number that the trainer or the update gave; None if the replica does not say.
    """

    weights: str
    number: int | None = None

    def __str__(self) -> str:
        return self.weights if self.number is None else f"{self.number} ({self.weights})"


@dataclass(frozen=True)
class Target:
    """Weights that a group of replicas is to have, and the call that writes them.

    Attributes:
        identity: Identity of the group; a group of another identity that takes its name has no target.
        version: Version of the weights.
        path: Directory of the weights, as replicas name it.
        body: Body of the call.
        headers: Headers of the call, an administrator's key included.
        seconds: Limit for the end of the requests in flight, and again for the call.
    """

    identity: Identity
    version: Version
    path: str
    body: bytes
    headers: Headers = field(repr=False)
    seconds: float


class Stage(str, enum.Enum):
    """Stage of an update at one replica."""

    WAITING = "waiting"  # for its turn
    DRAINING = "draining"  # requests in flight end
    WRITING = "writing"
    UPDATED = "updated"
    FAILED = "failed"
    UNCHANGED = "unchanged"  # the update has ended before its turn


@dataclass(eq=False)
class UpdateState:
    """State of a replica's updates.

    Attributes:
        stage: DRAINING or WRITING while the replica gets new weights, and no new requests; else None.
        problem: Reason why the last update failed; empty if it did not.
        offered: Process and version that the replica was last asked to have; it is asked once.
        call_ended: Set when a call in flight to the replica has ended.
    """

    stage: Stage | None = None
    problem: str = ""
    offered: tuple[str, Version] | None = None
    call_ended: asyncio.Event = field(default_factory=asyncio.Event)
