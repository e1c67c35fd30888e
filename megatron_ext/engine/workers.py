"""Workers: the other ranks, as commanded by rank 0's engine core."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class Workers:
    """Ranks that repeat each step of the engine core; this base class serves a world of one rank.

    Attributes:
        heartbeat: Maximum seconds between two messages of rank 0 to the ranks; None if there are no other ranks.
        has_stores: Whether the caches of the ranks have stores on disk.
    """

    heartbeat: float | None = None
    has_stores = False

    def begin_step(self) -> None:
        """Send the commands since the last message, and make all ranks take a step.

        Raises:
            RankError: A rank cannot be reached, or an earlier step failed.
        """

    def idle(self) -> None:
        """Send a heartbeat if the last message is older than its interval."""

    def release(self) -> None:
        """Return all ranks to their callers, who make them follow again before the next step.

        Raises:
            RankError: A rank cannot be reached.
        """

    def suspend(self) -> None:
        """Make all ranks free their pools now."""

    def resume(self) -> None:
        """Make all ranks allocate their pools before the next step."""

    def handing_over(self) -> AbstractContextManager[None]:
        """Return a context in which the other ranks are with their callers, who hand over shards of new weights.

        Raises:
            RankError: A rank cannot be reached.
        """
        return nullcontext()

    def meet(self) -> None:
        """Return when the stores of all ranks have obeyed the commands so far, if they have stores.

        Raises:
            RankError: A rank cannot be reached.
        """

    def go_live(self) -> None:
        """Make all ranks open the stores of their caches, unless they are open, and use them, beside rank 0.

        Raises:
            RankError: A rank cannot be reached.
        """

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
