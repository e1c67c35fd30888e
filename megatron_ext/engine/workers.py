"""Other ranks of the world, as rank 0's engine core tells them what to do."""

from __future__ import annotations

from typing import Protocol


class Workers(Protocol):
    """Ranks that repeat each step of the engine core.

    Attributes:
        heartbeat: Seconds after which the ranks must hear of rank 0; None if there are none.
    """

    heartbeat: float | None

    def begin_step(self) -> None:
        """Send the commands since the last message, and have all ranks take a step.

        Raises:
            RankError: A rank cannot be reached, or an earlier step failed.
        """

    def idle(self) -> None:
        """Send a sign of life if the last message is older than the heartbeat."""

    def suspend(self) -> None:
        """Have all ranks free their pools now."""

    def resume(self) -> None:
        """Have all ranks allocate their pools before the next step."""

    def stop(self) -> None:
        """Have all ranks leave; no step follows."""

    def step_error(self, error: Exception) -> Exception:
        """Return the error to raise after a step failed on rank 0.

        With several ranks that is a `RankError`, and no further step is taken.
        """


class NoWorkers:
    """Workers of a world of one rank."""

    heartbeat: float | None = None

    def begin_step(self) -> None:
        """See `Workers`."""

    def idle(self) -> None:
        """See `Workers`."""

    def suspend(self) -> None:
        """See `Workers`."""

    def resume(self) -> None:
        """See `Workers`."""

    def stop(self) -> None:
        """See `Workers`."""

    def step_error(self, error: Exception) -> Exception:
        """See `Workers`."""
        return error
