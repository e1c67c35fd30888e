"""Engine core: add requests, compute steps, return records, for one model replica or several that step together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import TypeVar, get_args

from megatron_ext.config.batching import SuspendLevel
from megatron_ext.config.in_flight import InFlight
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.engine.decode_share import DecodeShare
from megatron_ext.engine.disk_loading import DiskLoading
from megatron_ext.engine.error_isolation import ErrorIsolation
from megatron_ext.engine.executor import Executor, ModelResources, Workers
from megatron_ext.engine.input_processor import InputProcessor, InputSettings
from megatron_ext.engine.output_processor import OutputProcessor
from megatron_ext.engine.replica import Replica
from megatron_ext.engine.replica_choice import ReplicaChoice
from megatron_ext.engine.result import EngineStep, StepOutput, active_requests
from megatron_ext.engine.statistics import EngineStatistics, StepCounts, total
from megatron_ext.engine.step_log import StepLog
from megatron_ext.errors import ConfigError, EngineSuspended, WeightUpdateError
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.prefix_cache.disk.announcing import announce
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.prefix_cache.observer import CacheObserver, EntryObserver
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.planner import reason_to_refuse
from megatron_ext.scheduling.record import Outcome, RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.speculation.proposals import Proposals

Result = TypeVar("Result")


class EngineCore:
    """Engine core: adds requests, computes them step by step and returns records.

    Not thread-safe: `EngineClient` makes every call from one thread.

    Args:
        parts: Scheduler and executor of each replica, without requests; replica 0 computes on this rank.
        input_settings: Settings of the input processor.
        proposals: Drafts for decoding requests (SP-1); None without speculation.
        workers: Workers on the other ranks; by default there are no other ranks.
        resources: Weights and pools of the model; by default there is no model.
        logging_interval: See `StepLog`.
        routing: Policy that chooses the replica of a request; its defaults if missing.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Scheduler, Executor]],
        input_settings: InputSettings,
        *,
        proposals: Proposals | None = None,
        workers: Workers | None = None,
        resources: ModelResources | None = None,
        logging_interval: int | None = 0,
        routing: RoutingConfig | None = None,
    ) -> None:
        self.error_isolation = ErrorIsolation("the engine")
        self.output = OutputProcessor(input_settings.vocabulary, self.error_isolation)
        self.replicas = tuple(
            Replica(*part, input_settings, self.output, self.error_isolation, proposals) for part in parts
        )
        self.workers = workers or Workers()
        self.resources = resources or ModelResources()
        self.step_log = StepLog(logging_interval)
        self.step_count = 0
        self._captured: Counter[int] = Counter()  # steps by the rows of their graph
        self.update_error: WeightUpdateError | None = None  # of the last one, if the weights are of no version
        self.weights_version = 0  # of the weights that requests are computed with
        self._suspended_at: SuspendLevel | None = None
        self.disk: WarmRestart | None = None  # the cache's contents between processes; closed with the core
        self.host_work: Callable[[], None] = lambda: None  # while the device computes; may only add requests
        self._intake = InputProcessor(input_settings)
        share = self.scheduler.limits.decode_share
        self._decode_share = DecodeShare(share) if share else None
        self._choice: ReplicaChoice | None = None  # None for one replica
        if len(parts) > 1:
            self._choice = ReplicaChoice([scheduler for scheduler, _ in parts], routing or RoutingConfig())

    def attach_disk(self, open_disk: Callable[[], WarmRestart | None]) -> None:
        """Keep the cache in a store, which is closed with the core, or attached to the next one.

        Args:
            open_disk: Opens it, beside the other ranks; None if the directory cannot be used now.
        """
        self.workers.go_live()
        self.disk = open_disk()
        if self.disk is not None:
            self.workers.has_stores = True
            tiers = self.disk.go_live([replica.scheduler.cache for replica in self.replicas])
            for replica, (tier, memory) in zip(self.replicas, tiers, strict=False):
                replica.loading = DiskLoading(replica.scheduler, tier, memory)

    # Requests

    def tokenize(self, prompt: str | Sequence[int], add_bos: bool = False) -> tuple[int, ...]:
        """Return the token ids of a prompt; see `InputProcessor.tokenize`."""
        return self._intake.tokenize(prompt, add_bos)

    def add(
        self,
        request_id: int,
        inputs: RequestInputs,
        *,
        replica_index: int | None = None,
        group: int | None = None,
    ) -> Request:
        """Queue a request. A request that can never be served ends at once as FAILED; the next step reports it.

        Args:
            request_id: Unique among requests that have not been reported.
            inputs: What the caller asks for.
            replica_index: Index of the replica, modulo their number; by default the routing policy chooses one.
            group: Number of its group of equal prompts; see `Request`.

        Raises:
            ConfigError: The id is in use, or the prompt or the parameters are invalid for this model.
        """
        if request_id in self.output:
            raise ConfigError(f"request id {request_id} is in use; choose another")
        request = self._intake.make(request_id, inputs, group)
        matcher = self.output.matcher_of(request)  # first, since it may fail on the output that is continued
        refusal = reason_to_refuse(request, self.scheduler.limits)
        replica = self._replica_of(request, replica_index) if refusal is None else self.replicas[0]
        scheduler = replica.scheduler
        self.output.open(request, scheduler, matcher)
        if refusal is None:
            scheduler.add(request)
            replica.structured_outputs.add(request)
        else:
            request.end(Outcome(Status.FAILED, error=f"this prompt cannot be served: {refusal}"))
            self.output.ended.append(request)
        return request

    def _replica_of(self, request: Request, index: int | None) -> Replica:
        if self._choice is None:
            return self.replicas[0]
        return self.replicas[self._choice.choose(request, None if index is None else index % len(self.replicas))]

    def abort_all(self) -> None:
        """Abort all requests; see `OutputProcessor.abort`."""
        for request in self.output.requests():
            self.output.abort(request)

    @property
    def is_busy(self) -> bool:
        """True if a step would compute or report anything."""
        return bool(self.output) or any(one.audit is not None and one.audit.has_work for one in self.replicas)

    def cancel(self) -> None:
        """Forget all requests without a record; the core must not be used any more.

        Valuable entries of the cache are written to the store on disk, if there is one; the store stays open.
        """
        for replica in self.replicas:
            replica.async_scheduling.drop()
            replica.structured_outputs.forget(self.output.requests())
        self.output.cancel()
        if self.workers.keep_cache():
            self._keep_cache()

    def _keep_cache(self) -> None:
        """Write valuable entries of the cache to disk, as the other ranks do."""
        if self.disk is not None:
            with self.error_isolation.guard("the prefix cache on disk"):
                if self._suspended_at == "offload":
                    self.resources.allocate()  # the pools get their contents back
                self.disk.keep()

    # Steps

    def step(self) -> StepOutput:
        """Schedule, execute and commit one step, and turn its tokens into output.

        Raises:
            EngineSuspended: The pools have been freed; call `resume` first.
            RankError: One of several ranks has failed; no further step can succeed.
            Exception: The execution failed. The step's requests are requeued; a later step computes them.
        """
        step = self.compute()
        records = self.report(step)
        return StepOutput(active_requests(step), records, step.seconds)

    def compute(self) -> EngineStep:
        """Schedule, execute and commit one step; raises the errors of `step`."""
        if self.is_suspended:
            raise EngineSuspended("the engine is suspended; call resume() before a step")
        if self.resources.has_new_weights():  # written without a call of the engine
            self._use_new_weights()
        started = time.perf_counter()
        for replica in self.replicas:  # before the other ranks receive the proposals
            replica.propose()
        is_idle = not any(replica.has_other_work for replica in self.replicas)
        try:
            for replica in self.replicas:
                replica.prepare(1 / len(self.replicas), is_idle=is_idle)
            self.workers.begin_step()  # sends the commands recorded since the last step, also by `prepare`
            parts = tuple(replica.compute(self.host_work) for replica in self.replicas)
        except Exception as error:  # with several ranks a RankError: they are no longer in step
            raised = self.workers.step_error(error)
            if raised is error:
                raise
            raise raised from error
        step = EngineStep(parts, time.perf_counter() - started)
        if self._decode_share is not None:
            self._hold_prefills(self._decode_share.note(step))
        results = [part.result for part in parts if part.result is not None]
        self.step_count += bool(results)
        if self._choice is not None:
            self._choice.note_step()
        self._captured.update(one.graph_rows for one in results if one.graph_rows is not None)
        return step

    def _hold_prefills(self, are_held: bool) -> None:
        """Hold or release the prefills of all replicas, which step together."""
        for replica in self.replicas:
            if replica.scheduler.holds_prefills is not are_held:
                replica.scheduler.hold_prefills(are_held=are_held)

    def report(self, step: EngineStep) -> list[RequestRecord]:
        """Turn a step's tokens into scores, texts and records; raises no errors.

        Returns:
            Records of all requests that have ended since the last report.
        """
        for part in step.parts:
            if part.result is not None:
                self.output.take(part.chunks, part.result)
        ended = list(self.output.ended)
        records = self.output.report()
        for replica in self.replicas:
            replica.forget(ended)
        if self._choice is not None:
            self._choice.ended(ended)
        with self.error_isolation.guard("the log line of a step"):
            self.step_log.note(step, self.step_count, is_busy=bool(self.output), read=self.statistics)
        return records

    def synchronize(self) -> None:
        """Wait until the device is idle; a step that has been launched ahead keeps its result."""
        for replica in self.replicas:
            replica.async_scheduling.synchronize()

    def close(self) -> None:
        """Wait until the device is idle and stop the workers; no step may follow."""
        for replica in self.replicas:
            replica.close()
        try:
            if self.workers.stop():
                self._keep_cache()
        finally:
            if self.disk is not None:
                self.disk.abandon()

    # Cache, weights, pools

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: no earlier block is matched again, and running requests publish nothing."""
        for replica in self.replicas:
            replica.scheduler.reset_prefix_cache()
        self.workers.meet()

    def observe_caches(self, observers: Sequence[CacheObserver], disk_observers: Sequence[EntryObserver] = ()) -> None:
        """Attach an observer to the cache of each replica; it is told what a store has put back before.

        Args:
            observers: An observer for each replica.
            disk_observers: Likewise, observers of the entries on disk; none by default.
        """
        for replica, observer in zip(self.replicas, observers, strict=True):
            replica.scheduler.cache.observers.append(observer)
            if self.disk is not None:
                announce(replica.scheduler.cache, observer, replica.scheduler.root_of(None))
        for replica, one in zip(self.replicas, disk_observers, strict=False):
            if self.disk is not None:
                self.disk.announce_disk(one, replica.scheduler.root_of(None))

    def hottest_prefixes(self, count: int) -> list[CachedPrefix]:
        """Return the cached prefixes that most requests resumed from, the hottest first."""
        found = [prefix for replica in self.replicas for prefix in replica.scheduler.cache.hottest(count)]
        return nlargest(count, found, key=attrgetter("hits", "blocks")) if len(self.replicas) > 1 else found

    def change_weights(
        self,
        write: Callable[[], Result],
        in_flight: InFlight = InFlight.RECOMPUTE,
        version: int | None = None,
        *,
        is_complete: bool = True,
    ) -> Result:
        """Write new weights while the device is idle, and use them; for the options see `weights_changed`.

        Raises:
            WeightUpdateError: The write has failed; unless the old weights are back, all requests have failed, too.
        """
        self.synchronize()
        try:
            result = write()
        except WeightUpdateError as error:
            if not error.is_restored:
                self.update_error = error
                for request in self.output.requests():
                    self.output.fail(request, error)
            self.weights_changed(version=self.weights_version, is_complete=False)
            raise
        self.weights_changed(in_flight, version, is_complete=is_complete)
        return result

    def weights_changed(
        self, in_flight: InFlight = InFlight.RECOMPUTE, version: int | None = None, *, is_complete: bool = True
    ) -> None:
        """Handle an in-place change of the model's weights: the prefix cache is emptied.

        Args:
            in_flight: Treatment of requests in flight; with FINISH they have ended before.
            version: Version of the new weights; one more than the last if missing.
            is_complete: Whether all weights have that version; this also ends the state after a failed update.
        """
        if is_complete:
            self.update_error = None
        self.resources.mark_new_weights()
        self.resources.has_new_weights()  # so that the next step does not detect them again
        self._use_new_weights(in_flight, version)

    def continue_from(self, version: int) -> None:
        """Set the version of the weights of a core without requests, in the place of one that had it."""
        self.weights_version = version
        for replica in self.replicas:
            replica.async_scheduling.weights_version = version

    def check_weights(self) -> None:
        """Check the weights before requests are added; see `ModelResources`.

        Raises:
            WeightUpdateError: An update failed, and none has succeeded since.
        """
        if self.update_error is not None:
            raise self.update_error
        self.resources.check_weights(is_caching=self.is_caching)

    def _use_new_weights(self, in_flight: InFlight = InFlight.RECOMPUTE, version: int | None = None) -> None:
        self.weights_version = self.weights_version + 1 if version is None else version
        if in_flight is InFlight.ABORT:
            self.abort_all()
        if self.disk is not None:
            self.disk.weights_changed()
        for replica in self.replicas:
            replica.weights_changed(self.weights_version, restarts=in_flight is not InFlight.CONTINUE)
        self.workers.meet()
        self.resources.use_new_weights()

    def suspend(self, level: SuspendLevel | None = None) -> SuspendLevel:
        """Stop stepping until `resume`, and free the pools' memory as the level says; does nothing if suspended at it.

        Args:
            level: Level; None for the present level if suspended, else the resources' default.

        Returns:
            The level.

        Raises:
            ConfigError: There is no such level, another one is in force, or it does not work with several ranks.
            RuntimeError: There is too little host memory to offload the pools. The core is not suspended.
        """
        level = level or self._suspended_at or self.resources.suspend_level
        self._check_suspension(level)
        if self.is_suspended:
            return level
        for replica in self.replicas:
            if level == "drop":
                replica.suspend()
            else:
                replica.async_scheduling.synchronize()
        if level == "drop":
            self.workers.meet()
            self.workers.suspend()
            self.resources.free()
        elif level == "offload":
            self.resources.free(offloads=True)
        self._suspended_at = level
        return level

    def _check_suspension(self, level: str) -> None:
        if level not in get_args(SuspendLevel):
            raise ConfigError(f"level is {level!r}, and must be keep, offload or drop")
        if self._suspended_at not in (None, level):
            raise ConfigError(
                f"the engine is suspended at level {self._suspended_at}; resume it before it is suspended at {level}"
            )
        if self.workers.heartbeat is not None and level == "offload":
            raise ConfigError("level offload works with one rank; with several keep and drop do")

    def resume(self) -> None:
        """Allocate the pools again, unless they were kept; requests recompute dropped contents, and continue."""
        if self._suspended_at in ("offload", "drop"):
            self.resources.allocate()
            self.resources.capture()
        was_dropped, self._suspended_at = self._suspended_at == "drop", None
        if was_dropped:
            self.workers.resume()

    @property
    def is_suspended(self) -> bool:
        """True from `suspend` to `resume`."""
        return self._suspended_at is not None

    # Statistics

    @property
    def scheduler(self) -> Scheduler:
        """Scheduler of replica 0, whose pools are on this rank."""
        return self.replicas[0].scheduler

    @property
    def is_caching(self) -> bool:
        """True if prefix caching is on."""
        return self.scheduler.cache.is_enabled

    @property
    def counters(self) -> Counters:
        """Sum of the counters of all replicas."""
        return total([replica.scheduler.counters for replica in self.replicas])

    def statistics(self) -> EngineStatistics:
        """Return current sizes and counters, summed over all replicas."""
        parts = [(replica.scheduler, replica.audit) for replica in self.replicas]
        ended, disk = self.output.reported_count, None if self.disk is None else self.disk.use()
        return EngineStatistics.of(parts, ended=ended, steps=self.step_count, disk=disk)

    def step_counts(self) -> StepCounts:
        """Return the numbers of steps so far, summed over all replicas where these differ."""
        counters = self.counters
        return StepCounts(
            steps=self.step_count,
            captured=self._captured.copy(),
            asynchronous=counters.launched_ahead,
            discarding=sum(replica.async_scheduling.discarding_count for replica in self.replicas),
            prefill_tokens=counters.prefill_tokens,
        )

    def check(self) -> None:
        """Assert every invariant of requests and pools."""
        for replica in self.replicas:
            replica.scheduler.check()
        queued = [request for replica in self.replicas for request in replica.scheduler.queues]
        queued = [request for request in queued if request.audit is None]
        known = {id(request) for request in self.output.requests()}
        assert {id(request) for request in [*queued, *self.output.ended]} == known, "lost requests"
        if self._choice is not None:
            self._choice.check(queued)
