"""Worker: a rank other than 0, which repeats rank 0's steps from its commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_ext.engine.disk_loading import LoadPlacing
from megatron_ext.engine.executor import Executor, ModelResources
from megatron_ext.parallel.commands import Action, Add, Call, Command, Link, WeightsCommand
from megatron_ext.parallel.rank_drafters import RankDrafter
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.scheduling.disk_loads import BeginLoad, EndLoad, NoteRun, PlaceLoad
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler

_RETURNING = (Action.STOP, Action.RELEASE, Action.HAND_OVER)
OBEYED = frozenset({"draft", "forget_drafts", "go_live", "keep_cache", "reset", "resume", "suspend", "weights_changed"})
"""Methods of `Worker` that rank 0 calls by a command."""


class Worker:
    """Scheduler driven by rank 0's commands, and executor of the steps that it plans.

    A worker has no texts, no futures and no clock. A step's tokens come with its result, as on rank 0.

    Args:
        replica: Replica of this rank, whose commands it follows.
        link: Channel from rank 0.
        make_scheduler: Returns a scheduler without requests, equal to rank 0's.
        executor: Computes steps.
        resources: Weights and pools of this rank, changed on rank 0's commands.

    Attributes:
        open_store: Opens the store of this rank's part of a cache, unless that cannot be used; None if the ranks'
            caches have no stores.
        drafter: Drafter of this rank; None if rank 0 drafts alone.
        on_weights: Obeys commands for the weights of this rank; set before the first one.
        is_suspended: True while the pools are freed, so that nothing is sent until the resumption.
    """

    on_weights: Callable[[WeightsCommand], None]

    def __init__(
        self,
        replica: int,
        link: Link,
        make_scheduler: Callable[[], Scheduler],
        executor: Executor,
        resources: ModelResources,
    ) -> None:
        self.replica = replica
        self.open_store: Callable[[], WarmRestart | None] | None = None
        self._disk: WarmRestart | None = None
        self.drafter: RankDrafter | None = None
        self._to_draft: Sequence[tuple[int, int]] = ()  # until its drafts are computed
        self._placing: LoadPlacing | None = None  # once the store is live
        self._link = link
        self.step_count = 0
        self._make_scheduler = make_scheduler
        self._executor = executor
        self._resources = resources
        self.reset()

    def follow(self) -> Action:
        """Follow rank 0's batches until an action that returns to the caller: stop, release or hand-over."""
        action = Action.IDLE
        while action not in _RETURNING:
            batch = self._link.receive()
            self.obey(batch.of(self.replica))
            action = batch.action
            if action is Action.STEP:
                self.step()
            elif action is Action.DRAFT:
                self._compute_drafts()
            elif action is Action.MEET:
                self._link.meet()
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
        elif isinstance(command, Call):
            self._call(command)
        elif isinstance(command, BeginLoad | NoteRun):
            self._loads().obey(command, self._requests[command.request_id])
        elif isinstance(command, PlaceLoad | EndLoad):
            self._loads().obey(command)
        else:
            self.on_weights(command)

    def _call(self, command: Call) -> None:
        call = getattr(self if command.method in OBEYED else self.scheduler, command.method)
        if command.request_id is None:
            call(*command.arguments, **command.options)
            return
        request = self._requests[command.request_id]
        call(request, *command.arguments, **command.options)
        if request.is_ended:
            del self._requests[request.request_id]

    def _loads(self) -> LoadPlacing:
        assert self._placing is not None, "ranks load what all of them have"
        return self._placing

    # Methods that rank 0 calls by a command

    def suspend(self) -> None:
        """Free the pools; all requests wait and keep their tokens."""
        self.scheduler.suspend()
        self._resources.free()
        self.is_suspended = True

    def resume(self) -> None:
        """Allocate the pools again."""
        self._resources.allocate()
        self.is_suspended = False

    def reset(self) -> None:
        """Drop all requests and counters, and allocate freed pools again."""
        self.scheduler = self._make_scheduler()
        self._placing = None
        self._requests: dict[int, Request] = {}  # living requests
        self.resume()

    def weights_changed(self, *, restarts: bool) -> None:
        """Match nothing that was cached before; see `Scheduler.weights_changed`."""
        if self._disk is not None:
            self._disk.weights_changed()
        self._resources.mark_new_weights()
        self._resources.use_new_weights()
        self.scheduler.weights_changed(restarts=restarts)

    def go_live(self) -> None:
        """Open the store, and agree with the other ranks on the entries that all of them have."""
        if self._disk is None and self.open_store is not None:
            self._disk = self.open_store()
        if self._disk is not None:
            for tier, memory in self._disk.go_live([self.scheduler.cache]):
                self._placing = LoadPlacing(self.scheduler, tier, memory)

    def keep_cache(self) -> None:
        """Write the most valuable entries of the cache to the store, which stays open."""
        if self._disk is not None:
            self._disk.keep()

    def draft(self, limits: Sequence[tuple[int, int]]) -> None:
        """Note the requests whose drafts are computed before the next step; see `RankDrafter.propose`."""
        self._to_draft = limits

    def forget_drafts(self, request_id: int | None) -> None:
        """Forget what the drafter has kept of a request, or of all."""
        if self.drafter is not None:
            self.drafter.forget(request_id)

    # Steps

    def _compute_drafts(self) -> None:
        limits, self._to_draft = self._to_draft, ()
        if limits and self.drafter is not None:
            self.drafter.propose(limits, lambda request_id: self._requests[request_id].tokens)

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
