"""Interfaces of the engine core: executors of steps, the model's weights and pools, workers on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.config.batching import SuspendLevel
from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import ScheduledStep


class Computing(Protocol):
    """Handle of a step that may still be computed."""

    def result(self) -> StepResult:
        """Wait for the result, once. If that raises, the step is void."""


@dataclass(frozen=True)
class Computed:
    """Handle of a step that has been computed, or whose computation has raised an error."""

    found: StepResult | Exception

    def result(self) -> StepResult:
        """Return the result, or raise the error; see `Computing`."""
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Executor:
    """Executor of steps, one at a time and in the order of launches, from their messages alone.

    By default a step is computed when its launch returns. If a method raises, its step is void.
    """

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute a step, including snapshots."""
        raise NotImplementedError

    def idle(self) -> None:
        """Take part in a step without chunks; ranks that share experts take part in the computation of others."""

    def launch(self, step: ScheduledStep) -> Computing:
        """Launch a step; the host may do other work while it is computed."""
        return Computed(self.execute(step))

    @property
    def can_launch_next(self) -> bool:
        """True if the tokens of the step launched last are available to another step on the device."""
        return False

    def launch_next(self, step: ScheduledStep) -> Computing | None:
        """Launch a step of requests in the step launched last: decodes of `LAST_SAMPLED`, chunks that go on a prompt.

        Returns:
            None if this step cannot be launched before the tokens of that one are known; then nothing was done.
        """
        return None

    def name_states(self, states: Sequence[Snapshot]) -> None:
        """Set the block hashes of snapshots of a launched step, which were not known then."""


class ModelResources:
    """Weights and pools of the model on this rank; this base class serves engines without a model.

    Attributes:
        suspend_level: Level of a suspend that names none.
    """

    suspend_level: SuspendLevel = "drop"

    def has_new_weights(self) -> bool:
        """Return whether the weights changed since the last call."""
        return False

    def check_weights(self, *, is_caching: bool) -> None:
        """Check that an engine that was idle has the weights that it knows of, before requests are added.

        Args:
            is_caching: True if the engine keeps KV blocks or states of earlier requests.

        Raises:
            SilentWeightChange: It has others.
        """

    def mark_new_weights(self) -> None:
        """Record an in-place write of the weights; every engine around the model detects it."""

    def use_new_weights(self) -> None:
        """Drop everything on the device that was derived from the old weights, such as captured graphs."""

    def allocate(self) -> None:
        """Allocate the pools if they are absent."""

    def capture(self) -> None:
        """Capture the CUDA graphs that the settings ask for."""

    def free(self, *, offloads: bool = False) -> None:
        """Free the pools, and whatever else the next step can make again.

        Args:
            offloads: Whether the pools' contents wait in host memory until `allocate`; otherwise they are lost.
        """

    def bind_thread(self) -> None:
        """Make the calling thread use the model's device."""


class Workers:
    """Ranks that repeat each step of the engine core; this base class serves a world of one rank.

    Methods that send to the ranks raise `RankError` if one cannot be reached, or an earlier step failed.

    Attributes:
        heartbeat: Maximum seconds between two messages of rank 0 to the ranks; None if there are no other ranks.
        has_stores: Whether the caches of the ranks have stores on disk.
    """

    heartbeat: float | None = None
    has_stores = False

    def begin_step(self) -> None:
        """Send the commands since the last message, and make all ranks take a step."""

    def idle(self) -> None:
        """Send a heartbeat if the last message is older than its interval."""

    def release(self) -> None:
        """Return all ranks to their callers, who make them follow again before the next step."""

    def suspend(self) -> None:
        """Make all ranks free their pools now."""

    def resume(self) -> None:
        """Make all ranks allocate their pools before the next step."""

    def handing_over(self) -> AbstractContextManager[None]:
        """Return a context in which the other ranks are with their callers, who hand over shards of new weights."""
        return nullcontext()

    def meet(self) -> None:
        """Return when the stores of all ranks have obeyed the commands so far, if they have stores."""

    def go_live(self) -> None:
        """Make all ranks open the stores of their caches, unless they are open, and use them, beside rank 0."""

    def keep_cache(self) -> bool:
        """Make all ranks write their caches to their stores, beside rank 0; False if they do not follow now."""
        return True

    def stop(self) -> bool:
        """Stop all ranks, which write their caches to their stores, beside rank 0; no step may follow.

        Returns:
            False if they did not follow any more.
        """
        return True

    def step_error(self, error: Exception) -> Exception:
        """Return the error to raise after a step failed on rank 0.

        With several ranks this is a `RankError`, and no further step is taken.
        """
        return error
