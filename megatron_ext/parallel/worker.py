"""Worker: a rank other than 0, which repeats rank 0's steps from its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_ext.engine.disk_loading import LoadPlacing
from megatron_ext.engine.executor import Executor, ModelResources
from megatron_ext.parallel.commands import (
    Action,
    Add,
    Allow,
    Batch,
    Call,
    Command,
    DescribeWeights,
    Draft,
    End,
    ForgetDrafts,
    GoLive,
    KeepCache,
    ReadWeights,
    Reset,
    Resume,
    Suspend,
    UpdateWeights,
    WeightsChanged,
    WeightsCommand,
)
from megatron_ext.parallel.rank_drafters import RankDrafter
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.scheduling.disk_loads import BeginLoad, EndLoad, NoteRun, PlaceLoad
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler

_RETURNING = (Action.STOP, Action.RELEASE, Action.HAND_OVER)


def _nothing() -> None:
    """Wait for no other rank."""


def _no_store() -> None:
    """Open nothing."""


class Worker:
    """Scheduler driven by rank 0's commands, and executor of the steps that it plans.

    A worker has no texts, no futures and no clock. A step's tokens come with its result, as on rank 0.

    Args:
        replica: Replica of this rank, whose commands it follows.
        receive: Waits for rank 0's next batch.
        make_scheduler: Returns a scheduler without requests, equal to rank 0's.
        executor: Computes steps.
        resources: Weights and pools of this rank, changed on rank 0's commands.
        meet: Returns when all ranks have obeyed the last batch.

    Attributes:
        open_store: Opens the store of this rank's part of a cache; None if it cannot be used, or the ranks' caches have
            no stores.
        drafter: Drafter of this rank; None if rank 0 drafts alone.
        on_weights: Obeys commands for the weights of this rank; set before the first one.
        is_suspended: True while the pools are freed, so that nothing is sent until the resumption.
    """

    on_weights: Callable[[WeightsCommand], None]

    def __init__(
        self,
        replica: int,
        receive: Callable[[], Batch],
        make_scheduler: Callable[[], Scheduler],
        executor: Executor,
        resources: ModelResources,
        meet: Callable[[], None] = _nothing,
    ) -> None:
        self.replica = replica
        self.open_store: Callable[[], WarmRestart | None] = _no_store
        self._meet = meet
        self._disk: WarmRestart | None = None
        self.drafter: RankDrafter | None = None
        self._draft: Draft | None = None  # until it is obeyed
        self._placing: LoadPlacing | None = None  # once the store is live
        self._receive = receive
        self.step_count = 0
        self._make_scheduler = make_scheduler
        self._executor = executor
        self._resources = resources
        self._reset()

    def follow(self) -> Action:
        """Follow rank 0's batches until an action that returns to the caller: stop, release or hand-over."""
        action = Action.IDLE
        while action not in _RETURNING:
            batch = self._receive()
            self.obey(batch.of(self.replica))
            action = batch.action
            if action is Action.STEP:
                self.step()
            elif action is Action.DRAFT:
                self._compute_drafts()
            elif action is Action.MEET:
                self._meet()
        if action is Action.STOP and self._disk is not None:
            self._disk.close()
        return action

    def free(self) -> None:
        """Free the pools of a rank that follows no more, and close the store."""
        if self._disk is not None:
            self._disk.abandon()
        self._resources.free()

    def obey(self, commands: Iterable[Command]) -> None:
        """Apply the commands between two steps, in order."""
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Add):
            request = command.make()
            self._requests[request.request_id] = request
            self.scheduler.add(request)
        elif isinstance(command, End):
            self.scheduler.end(self._requests.pop(command.request_id), command.status)
        elif isinstance(command, Allow):
            self.scheduler.allow(self._requests[command.request_id], command.masks)
        elif isinstance(command, Call):
            getattr(self.scheduler, command.method)(**command.arguments)
        elif isinstance(command, Draft):
            self._draft = command
        elif isinstance(command, Suspend):
            self.scheduler.suspend()
            self._resources.free()
            self.is_suspended = True
        elif isinstance(command, Resume):
            self._resources.allocate()
            self.is_suspended = False
        elif isinstance(command, Reset):
            self._reset()
        else:
            self._obey_for_cache(command)

    def _obey_for_cache(self, command: Command) -> None:
        if isinstance(command, WeightsChanged):
            if self._disk is not None:
                self._disk.weights_changed()
            self._resources.mark_new_weights()
            self._resources.use_new_weights()
            self.scheduler.weights_changed(restarts=command.restarts)
        elif isinstance(command, ForgetDrafts):
            if self.drafter is not None:
                self.drafter.forget(command.request_id)
        elif isinstance(command, DescribeWeights | ReadWeights | UpdateWeights):
            self.on_weights(command)
        else:
            self._obey_for_disk(command)

    def _obey_for_disk(self, command: Command) -> None:
        if isinstance(command, BeginLoad | NoteRun):
            self._loads().obey(command, self._requests[command.request_id])
        elif isinstance(command, PlaceLoad | EndLoad):
            self._loads().obey(command)
        elif isinstance(command, GoLive):
            self._go_live()
        else:
            assert isinstance(command, KeepCache), f"{command} is not a command"
            if self._disk is not None:
                self._disk.keep()

    def _loads(self) -> LoadPlacing:
        assert self._placing is not None, "ranks load what all of them have"
        return self._placing

    def _go_live(self) -> None:
        if self._disk is None:
            self._disk = self.open_store()
        if self._disk is not None:
            for tier, memory in self._disk.go_live([self.scheduler.cache]):
                self._placing = LoadPlacing(self.scheduler, tier, memory)

    def _reset(self) -> None:
        self.scheduler = self._make_scheduler()
        self._placing = None
        self._requests: dict[int, Request] = {}  # living requests
        self._resources.allocate()
        self.is_suspended = False

    def _compute_drafts(self) -> None:
        command, self._draft = self._draft, None
        if command is not None and self.drafter is not None:
            self.drafter.propose(command, lambda request_id: self._requests[request_id].tokens)

    def step(self) -> None:
        """Plan, execute and commit one step, as `EngineCore.compute` does; a step that raises is not retried."""
        if self._placing is not None:
            self._placing.follow()
        plan = self.scheduler.schedule()
        if not plan.chunks:
            self._executor.idle()
            return
        step = self.scheduler.describe(plan)
        result = self._executor.execute(step)
        for request in self.scheduler.commit(step, result.tokens, result.target_tokens):
            del self._requests[request.request_id]
        self.step_count += 1
