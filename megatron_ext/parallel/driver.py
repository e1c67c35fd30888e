"""Driver: rank 0's side of a world, which makes the other ranks repeat each step of the engine core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from megatron_ext.engine.executor import Workers
from megatron_ext.errors import ConfigError, RankError, WeightUpdateError, describe
from megatron_ext.parallel.commands import Action, Batch, Call, Command, Link, RecordingScheduler


class Driver(Workers):
    """`Workers` of a world of several ranks.

    Before each step one batch goes to all ranks: the commands that rank 0's schedulers recorded since the last batch. A
    step that fails on any rank is the last one.

    Args:
        schedulers: Scheduler of each replica, on rank 0.
        link: Channel to all other ranks.
        heartbeat: Maximum seconds between two batches of rank 0.
        releases: Whether a suspension releases the other ranks: nothing is sent then until the resumption.
    """

    def __init__(
        self, schedulers: Sequence[RecordingScheduler], link: Link, heartbeat: float, *, releases: bool = False
    ) -> None:
        self.heartbeat: float | None = heartbeat
        self._schedulers = tuple(schedulers)
        self._link = link
        self._sent_at = time.monotonic()
        self._end: RankError | None = None  # the cause of every later error
        self._releases = releases
        self._is_released = False
        self.has_stores = False
        self.note(Call("reset"))

    def begin_step(self) -> None:
        """Send the commands and start a step; see `Workers.begin_step`."""
        self._tell(Action.STEP)

    def draft(self, replica: int, limits: Sequence[tuple[int, int]]) -> None:
        """Make the ranks of a replica compute drafts, after the commands recorded before; see `RankDrafter.propose`."""
        self._schedulers[replica].note(Call("draft", (limits,)))
        self._tell(Action.DRAFT)

    def note(self, command: Command) -> None:
        """Record a command for all replicas, sent with the next batch."""
        for scheduler in self._schedulers:
            scheduler.note(command)

    def replica_of(self, request_id: int) -> int:
        """Return the replica of a request in the batch."""
        if len(self._schedulers) == 1:
            return 0
        queues = [one.queues for one in self._schedulers]
        held = ({request.request_id for request in (*one.running, *one.paused)} for one in queues)
        return next(replica for replica, names in enumerate(held) if request_id in names)

    def idle(self) -> None:
        """Send a heartbeat if it is due; see `Workers.idle`."""
        assert self.heartbeat is not None, "there are other ranks"
        if not self._is_released and time.monotonic() - self._sent_at >= self.heartbeat:
            self._tell(Action.IDLE)

    def release(self) -> None:
        """Send the recorded commands, and return the other ranks to their callers; see `Workers.release`."""
        self._tell(Action.RELEASE)

    def suspend(self) -> None:
        """Send the recorded suspension; see `Workers.suspend`."""
        self._tell(Action.RELEASE if self._releases else Action.IDLE)
        self._is_released = self._releases

    def resume(self) -> None:
        """Record the resumption; see `Workers.resume`."""
        self._is_released = False
        self.note(Call("resume"))

    def tell(self, command: Command) -> None:
        """Send a command for all replicas at once.

        Raises:
            ConfigError: The other ranks have been released.
        """
        if self._is_released:
            raise ConfigError(
                "the other ranks do not follow while the engine is suspended; call resume() first, or "
                "update_weights_from_shards on all ranks"
            )
        self.note(command)
        self._tell(Action.IDLE)

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Return the other ranks to their callers, who hand over shards together with this rank; then take them back.

        They obey commands again from the end of the block on, before they return once more. Nothing is sent after an
        error that other ranks do not share.
        """
        self._tell(Action.HAND_OVER)
        try:
            yield
        except (ConfigError, WeightUpdateError):
            self.release()
            raise
        self.release()

    def meet(self) -> None:
        """Send the recorded commands, and wait until they are obeyed, if ranks have stores; see `Workers.meet`.

        Released ranks obey them first of all when they follow again; nothing is sent to them before.
        """
        if not self.has_stores or self._is_released:
            return
        self._tell(Action.MEET)
        try:
            self._link.meet()
        except Exception as error:
            raise self.step_error(error) from error

    def go_live(self) -> None:
        """Send the command; see `Workers.go_live`."""
        self.tell(Call("go_live"))

    def keep_cache(self) -> bool:
        """Send the command, if the workers follow; see `Workers.keep_cache`."""
        if self.has_stores and self._follow:
            self.tell(Call("keep_cache"))
        return self._follow

    def stop(self) -> bool:
        """Stop the workers, see `Workers.stop`; a second call, or one with released workers, sends nothing."""
        followed = self._follow
        if followed:
            self._tell(Action.STOP)
        self._end = self._end or RankError("the ranks have been stopped; start again")
        return followed

    @property
    def _follow(self) -> bool:
        """True if the workers wait for the next batch."""
        return self._end is None and not self._is_released

    def _tell(self, action: Action) -> None:
        """Send one batch with every command since the last one.

        Raises:
            RankError: A rank cannot be reached, now or earlier. Callers may report it in any order, so a later error
                is caused by the first one, which names the lost rank.
        """
        if self._end is not None:
            raise RankError("the ranks are no longer in step; start again") from self._end
        noted = tuple((i, command) for i, one in enumerate(self._schedulers) for command in one.take_commands())
        try:
            self._link.send(Batch(action, noted))
        except Exception as error:
            raise self.step_error(error) from error
        self._sent_at = time.monotonic()

    def step_error(self, error: Exception) -> RankError:
        """Return an error of a step as a RankError, and keep the first one; see `Workers.step_error`."""
        rank_error = error if isinstance(error, RankError) else RankError(describe(error))
        self._end = self._end or rank_error
        return rank_error


def driver_of(workers: Workers) -> Driver:
    """Return the driver of a world of several ranks."""
    assert isinstance(workers, Driver), "there are no other ranks"
    return workers
