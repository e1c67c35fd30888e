"""Worker: a rank other than 0, which repeats rank 0's steps from its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from megatron_ext.engine.executor import Executor
from megatron_ext.parallel.commands import (
    Action,
    Add,
    Allow,
    Batch,
    Command,
    End,
    Propose,
    Quarantine,
    ResetPrefixCache,
    Resume,
    StartAnew,
    Suspend,
    WeightsChanged,
)
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


class Memory(Protocol):
    """Weights and pools of this rank; see `ModelResources`."""

    def mark_new_weights(self) -> None:
        """Record an in-place write of the weights."""

    def allocate(self) -> None:
        """Allocate the pools if they are not allocated."""

    def free(self) -> None:
        """Free the pools if they are allocated; their contents are lost."""


class Worker:
    """Scheduler driven by rank 0's commands, and executor of the steps that it plans.

    A worker has no texts, no futures and no clock. A step's tokens come with its result, as on rank 0.

    Args:
        replica: Replica of this rank, whose commands it follows.
        receive: Waits for rank 0's next batch.
        make_scheduler: Returns a scheduler without requests, equal to rank 0's.
        executor: Computes steps.
        memory: Pools, allocated and freed on rank 0's commands.
    """

    def __init__(
        self,
        replica: int,
        receive: Callable[[], Batch],
        make_scheduler: Callable[[], Scheduler],
        executor: Executor,
        memory: Memory,
    ) -> None:
        self.replica = replica
        self._receive = receive
        self.step_count = 0
        self._make_scheduler = make_scheduler
        self._executor = executor
        self._memory = memory
        self._start_anew()

    def follow(self) -> bool:
        """Follow rank 0's batches until the stop action, or until this rank is released; return whether it was stop."""
        action = Action.IDLE
        while action not in (Action.STOP, Action.RELEASE):
            batch = self._receive()
            self.obey(batch.of(self.replica))
            action = batch.action
            if action is Action.STEP:
                self.step()
        return action is Action.STOP

    def free(self) -> None:
        """Free the pools of a rank that follows no more."""
        self._memory.free()

    def obey(self, commands: Iterable[Command]) -> None:
        """Apply the commands between two steps, in order."""
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Add):
            request = Request(command.submission)
            self._requests[request.request_id] = request
            self.scheduler.add(request)
        elif isinstance(command, End):
            self.scheduler.end(self._requests.pop(command.request_id), command.status)
        elif isinstance(command, Allow):
            self.scheduler.allow(self._requests[command.request_id], command.masks)
        elif isinstance(command, Propose):
            self.scheduler.propose(dict(command.drafts))
        elif isinstance(command, Quarantine):
            self.scheduler.quarantine(command.block_hash, states_only=command.states_only)
        elif isinstance(command, ResetPrefixCache):
            self.scheduler.reset_prefix_cache()
        elif isinstance(command, WeightsChanged):
            self._memory.mark_new_weights()
            self.scheduler.weights_changed(restarts=command.restarts)
        elif isinstance(command, Suspend):
            self.scheduler.suspend()
            self._memory.free()
        elif isinstance(command, Resume):
            self._memory.allocate()
        else:
            assert isinstance(command, StartAnew), f"{command} is not a command"
            self._start_anew()

    def _start_anew(self) -> None:
        self.scheduler = self._make_scheduler()
        self._requests: dict[int, Request] = {}  # living requests
        self._memory.allocate()

    def step(self) -> None:
        """Plan, execute and commit one step, as `EngineCore.compute` does; a step that raises is not retried."""
        plan = self.scheduler.schedule()
        for request, _ in plan.failures:
            del self._requests[request.request_id]
        if not plan.chunks:
            self._executor.idle()
            return
        step = self.scheduler.describe(plan)
        result = self._executor.execute(step)
        for request in self.scheduler.commit(step, result.tokens, result.target_tokens):
            del self._requests[request.request_id]
        self.step_count += 1
