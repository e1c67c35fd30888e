"""A rank other than 0: it does what it is told, and decides the same as rank 0 because it was told the same."""

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
    ResetPrefixCache,
    Resume,
    StartAnew,
    Suspend,
    WeightsChanged,
)
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step


class Memory(Protocol):
    """The pools of this rank."""

    def allocate(self) -> None:
        """See that they are there."""

    def free(self) -> None:
        """See that they are not; their contents are lost."""


class Worker:
    """A scheduler that is led by commands, and the steps that it writes, computed.

    There are no texts here, no futures and no clock. A step's tokens come with its result, as rank 0 gets them.

    Args:
        replica: Whose commands are meant for this rank.
        receive: Waits for rank 0's next batch.
        make_scheduler: Without requests; equal to rank 0's.
        executor: Computes steps.
        memory: Comes and goes as rank 0 says.
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

    def follow(self) -> None:
        """Do what rank 0 says until it says stop."""
        action = Action.IDLE
        while action is not Action.STOP:
            batch = self._receive()
            self.obey(batch.of(self.replica))
            action = batch.action
            if action is Action.STEP:
                self.step()

    def obey(self, commands: Iterable[Command]) -> None:
        """What happens between two steps, in order."""
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
        elif isinstance(command, ResetPrefixCache):
            self.scheduler.reset_prefix_cache()
        elif isinstance(command, WeightsChanged):
            self.scheduler.weights_changed()
        elif isinstance(command, Suspend):
            self.scheduler.suspend()
            self._memory.free()
        elif isinstance(command, Resume):
            self._memory.allocate()
        else:
            assert isinstance(command, StartAnew), f"{command} is no command"
            self._start_anew()

    def _start_anew(self) -> None:
        self.scheduler = self._make_scheduler()
        self._requests: dict[int, Request] = {}  # those that live
        self._memory.allocate()

    def step(self) -> None:
        """Plan, execute and commit one step, as `Engine.compute` does; nothing that raises is tried again."""
        plan = self.scheduler.schedule()
        for request, _ in plan.failures:
            del self._requests[request.request_id]
        if not plan.chunks:
            self._executor.idle()
            return
        step = describe_step(plan.chunks, self.scheduler.limits.block_size)
        result = self._executor.execute(step)
        for request in self.scheduler.commit(step, result.tokens, result.target_tokens):
            del self._requests[request.request_id]
        self.step_count += 1
