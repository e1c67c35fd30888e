"""A step between its launch and the commit of what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.engine.executor import Computed, Computing
from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.step import ScheduledStep


@dataclass(frozen=True)
class Lost:
    """A step whose computation has raised."""

    error: Exception

    def result(self) -> StepResult:
        """See `Computing`."""
        raise self.error


@dataclass(frozen=True)
class InFlightStep:
    """A step that has been launched.

    Requests can end while it is under way, if it was launched before the tokens of the step before were known: their
    rows are *discarded*, and what comes of them is nobody's. Rows are told apart by their request and not by its id,
    which may be another one's by then.

    Attributes:
        plan: What it does.
        step: The message that is computed.
        computing: What is waited for.
    """

    plan: StepPlan
    step: ScheduledStep
    computing: Computing

    @property
    def chunks(self) -> Sequence[Chunk]:
        """What it computes, in the order of the message."""
        return self.plan.chunks

    def living(self) -> InFlightStep | None:
        """The same without discarded rows; None if it has no other ones."""
        alive = [not chunk.request.is_ended for chunk in self.chunks]
        if all(alive):
            return self
        if not any(alive):
            return None
        chunks = tuple(one for one, is_alive in zip(self.chunks, alive, strict=True) if is_alive)
        told = tuple(one for one, is_alive in zip(self.step.chunks, alive, strict=True) if is_alive)
        step = ScheduledStep(told, sum(alive[: self.step.num_decode]))
        return InFlightStep(dataclasses.replace(self.plan, chunks=chunks), step, self.computing)

    def landed(self) -> InFlightStep:
        """The same when it has been computed, or cannot be any more: `result` waits no longer."""
        try:
            return dataclasses.replace(self, computing=Computed(self.computing.result()))
        except Exception as error:  # for whoever asks for the result
            return dataclasses.replace(self, computing=Lost(error))

    def result(self) -> StepResult:
        """Wait for what came of its rows.

        If that raises, nothing of the step counts.
        """
        result = self.computing.result()
        names = {chunk.request_id for chunk in self.step.chunks}
        return result if result.tokens.keys() <= names else result.of(names)
