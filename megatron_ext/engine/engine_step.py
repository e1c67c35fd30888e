"""Steps of the engine core: committed chunks, and the output that they yield."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.engine.replica import ReplicaStep
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request


@dataclass(frozen=True)
class EngineStep:
    """Committed step whose output has not been processed yet.

    Attributes:
        parts: One step of each replica.
        seconds: Time to plan, execute and commit.
    """

    parts: tuple[ReplicaStep, ...] = ()
    seconds: float = 0.0

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Scheduled chunks of callers' requests in all replicas."""
        return [chunk for part in self.parts for chunk in part.chunks]


@dataclass(frozen=True)
class StepOutput:
    """Outcome of one step.

    Attributes:
        active: Requests that computed a chunk in the step and continue.
        records: Records of all requests that have ended since the last step.
        seconds: Time to plan, execute and commit.
    """

    active: Sequence[Request]
    records: Sequence[RequestRecord]
    seconds: float


def active_requests(step: EngineStep) -> list[Request]:
    """Return the requests of a reported step that continue."""
    return [chunk.request for chunk in step.chunks if not chunk.request.is_ended]
