"""What an engine's call of `compute` gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.foresight import plan_of
from megatron_ext.scheduling.plan import StepPlan


@dataclass(frozen=True)
class Step:
    """A step that has been planned, and computed unless there was nothing to compute.

    Attributes:
        plan: What it does.
        result: None if nothing was computed.
        seconds: That it took.
    """

    plan: StepPlan
    result: StepResult | None
    seconds: float

    @property
    def chunks(self) -> Sequence[Chunk]:
        """What it computed."""
        return self.plan.chunks


NO_STEP = Step(plan_of(()), None, 0.0)
