"""Step in flight: between its launch and the commit of its result."""

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
class FailedComputation:
    """Step whose computation has raised an error."""

    error: Exception

    def result(self) -> StepResult:
        """Raise the error; see `Computing`."""
        raise self.error


@dataclass(frozen=True)
class InFlightStep:
    """Launched step whose result has not been committed.

    Requests can end while the step is in flight, if it was launched before the tokens of the step before were known:
    their rows are *discarded*, and so are the results. Rows are matched by request object and not by id, because
    another request may have the id by then.

    Attributes:
        plan: Plan of the step.
        step: Message that is computed.
        computing: Handle of the computation.
        weights_version: Version of the weights that it is computed with.
    """

    plan: StepPlan
    step: ScheduledStep
    computing: Computing
    weights_version: int

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Chunks that the step computes, in the order of the message."""
        return self.plan.chunks

    def living(self) -> InFlightStep | None:
        """Return the step without discarded rows; None if no other rows are left."""
        alive = [not chunk.request.is_ended for chunk in self.chunks]
        if all(alive):
            return self
        if not any(alive):
            return None
        chunks = tuple(one for one, is_alive in zip(self.chunks, alive, strict=True) if is_alive)
        kept_chunks = tuple(one for one, is_alive in zip(self.step.chunks, alive, strict=True) if is_alive)
        step = ScheduledStep(kept_chunks, sum(alive[: self.step.num_decode]))
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, chunks=chunks), step=step)

    def synchronized(self) -> InFlightStep:
        """Return the step after its computation has succeeded or failed: `result` does not wait any more."""
        try:
            return dataclasses.replace(self, computing=Computed(self.computing.result()))
        except Exception as error:  # raised again by `result`
            return dataclasses.replace(self, computing=FailedComputation(error))

    def result(self) -> StepResult:
        """Wait for the results of its rows.

        If that raises, the step is void.
        """
        result = self.computing.result()
        names = {chunk.request_id for chunk in self.step.chunks}
        return result if result.tokens.keys() <= names else result.of(names)
