"""Workers: the other ranks, as commanded by rank 0's engine core."""

from __future__ import annotations

from typing import Protocol


class Workers(Protocol):
    """Ranks that repeat each step of the engine core.

    Attributes:
        heartbeat: Maximum seconds between two messages of rank 0 to the ranks; None if there are no other ranks.
    """

    heartbeat: float | None

    def begin_step(self) -> None:
        """Send the commands since the last message, and make all ranks take a step.

        Raises:
            RankError: A rank cannot be reached, or an earlier step failed.
        """

    def idle(self) -> None:
        """Send a heartbeat if the last message is older than its interval."""

    def suspend(self) -> None:
        """Make all ranks free their pools now."""

    def resume(self) -> None:
        """Make all ranks allocate their pools before the next step."""

    def stop(self) -> None:
        """Stop all ranks; no step may follow."""

    def step_error(self, error: Exception) -> Exception:
        """Return the error to raise after a step failed on rank 0.

        With several ranks this is a `RankError`, and no further step is taken.
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
        """Return the error unchanged; see `Workers`."""
        return error
