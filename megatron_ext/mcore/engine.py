"""The engine: requests in, one step at a time, records out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineSuspendedError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import Counter
from megatron.core.utils import get_asyncio_loop
from torch import nn

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError, RestoreError
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController, StepResult
from megatron_ext.mcore.faults import Faults, describe
from megatron_ext.mcore.intake import Intake
from megatron_ext.mcore.output import OutputProcessor
from megatron_ext.mcore.statistics import log_step, prefix_cache_statistics
from megatron_ext.mcore.weights import WeightsWatch, mark_weights_changed
from megatron_ext.memory.budget import Geometry
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.scheduling.planner import StepPlan, check_admissible
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler

NOTHING = StepPlan(evictions=(), pauses=(), resumes=(), failures=(), admissions=(), chunks=(), refusals=())


class InferenceEngine(DynamicInferenceEngine):
    """`DynamicInferenceEngine` over a scheduler on the host.

    A step is schedule -> stage -> forward and sample -> commit -> output, and gives way to other tasks of the event
    loop only before it begins: whatever calls `add_request`, `abort_request` or `suspend` meets a consistent state.
    What raises before the commit sends the step's requests back to wait; the commit cannot fail; what raises after it
    ends at most the request that it was for (see `OutputProcessor`).

    Args:
        controller: Ours.
        context: Ours.
        random_seed: Requests without a seed of their own get one derived from it and their id.
        inference_logging_step_interval: Log a line every so many steps; 0 is never.
    """

    context: InferenceContext
    controller: InferenceController

    def __init__(
        self,
        controller: InferenceController,
        context: InferenceContext,
        random_seed: int = 1234,
        *,
        inference_logging_step_interval: int = 0,
    ) -> None:
        super().__init__(
            controller,
            context,
            random_seed=random_seed,
            enable_chunked_prefill=context.limits.chunked_prefill,
            inference_logging_step_interval=inference_logging_step_interval,
        )

    def create_cuda_graphs(self, reset_context: bool = True) -> None:
        """Refuse CUDA graphs, which are not supported so far.

        Raises:
            ConfigError: The model's configuration asks for them.
        """
        if self.cuda_graph_impl == "local":
            raise ConfigError("cuda_graph_impl 'local' is not supported by this engine; use 'none'")

    def reset(self) -> None:
        """Forget all requests (their futures are cancelled) and counters; a suspended engine gets its pools back."""
        if hasattr(self, "_output"):
            self._output.cancel()
        self.context.reset()
        self.context.allocate_all_tensors(is_init=False)
        self.request_counter = Counter()
        self.rank = torch.distributed.get_rank()
        self.step_count = 0
        self.faults = Faults("the engine")
        self._weights = WeightsWatch(self._model)
        self._output = OutputProcessor(self.scheduler, self.controller.vocabulary, self.faults)
        self._intake = Intake(self.controller, self.context.max_sequence_length, self.random_seed)
        self._reset_loop_state()

    def _reset_loop_state(self) -> None:
        """Names that upstream's run loops and coordinator code use."""
        self._loop = get_asyncio_loop(getattr(self, "_loop", None))
        self._cond = asyncio.Condition()
        self.running = asyncio.Event()
        self.paused = asyncio.Event()
        self.stopped = asyncio.Event()
        self.received_pause = False
        self.received_stop = False
        self.suspend_signal = False
        self.is_suspended = False
        self.use_coordinator = False

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step on this event loop from now on, for an engine in a thread of its own; without living requests only."""
        assert not self._output, "requests are alive, and their futures belong to another loop"
        self._loop = get_asyncio_loop(loop)

    @property
    def geometry(self) -> Geometry:
        """Effective sizes of the pools."""
        return self.context.geometry

    @property
    def longest_request_state_bytes(self) -> int:
        """Bytes of recurrent states that a request of the longest possible prompt takes at most."""
        return self.context.request_state_bytes(self.context.max_sequence_length)

    @property
    def scheduler(self) -> Scheduler:
        """The context's scheduler: queues, blocks, live rows."""
        return self.context.scheduler

    @property
    def waiting_request_ids(self) -> list[int]:
        """Ids of the requests that wait for admission, and of ended ones still to be reported by a step."""
        return [request.request_id for request in [*self.scheduler.queues.waiting, *self._output.ended]]

    # Requests come and go

    def add_request(
        self,
        request_id: int,
        prompt: str | Sequence[int] | torch.Tensor,
        sampling_params: RequestParams | SamplingParams | None = None,
    ) -> asyncio.Future[RequestRecord]:
        """Queue a request. What can never be served ends at once, as FAILED; the others go on.

        Args:
            request_id: Not in use by a living request.
            prompt: Text, or token ids.
            sampling_params: Ours or Megatron's; greedy if missing.

        Returns:
            A future of the request's record; the step that ends the request reports it too.

        Raises:
            ConfigError: The prompt or the parameters make no sense, whatever the engine's limits.
        """
        if request_id in self._output:
            raise ConfigError(f"request id {request_id} is in use; choose another")
        request = self._intake.make(request_id, prompt, sampling_params)
        error = check_admissible(request, self.context.limits)
        if error is None:
            self.scheduler.add(request)
        else:
            request.end(Status.FAILED, error=f"this prompt cannot be served: {error}")
            self._output.ended.append(request)
        future = self._loop.create_future()
        self._output.open(request, future)
        self._wake_up()
        return future

    def abort_request(self, request_id: int) -> None:
        """End a living request now; its blocks and its live row are free at once (EX-8). Others do not notice.

        Raises:
            KeyError: No living request has this id.
        """
        request = self._output.get(request_id)
        if not request.is_ended:
            self.scheduler.end(request, Status.ABORTED)
            self._output.ended.append(request)
            self._wake_up()

    def fail_request(self, request_id: int, error: Exception) -> None:
        """End a living request as FAILED, because what only it needed has raised. Others do not notice.

        Raises:
            KeyError: No living request has this id.
        """
        self._output.fail(self._output.get(request_id), error)
        self._wake_up()

    @property
    def finished_request_count(self) -> int:
        """Requests that have been reported as ended."""
        return self._output.reported_count

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._output)

    def get_request(self, request_id: int) -> Request:
        """A living request."""
        return self._output.get(request_id)

    def _wake_up(self) -> None:
        """Let upstream's run loop, if it waits, look again."""
        self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    # Steps

    async def async_forward(self) -> tuple[StepResult | None, StepPlan, float, int]:
        """Schedule, compute, sample and commit one step.

        If staging, forward or sampling raises, the step's requests go back to wait (their pools may hold anything) and
        the error is passed on; a later step computes them again.

        Returns:
            Result (None if nothing was to be computed), plan, seconds, step count: arguments of `async_bookkeep`.

        Raises:
            EngineSuspendedError: The engine is suspended.
        """
        if self.is_suspended:
            raise EngineSuspendedError("the engine is suspended; call resume() before a step")
        await asyncio.sleep(0)
        if (
            self.is_suspended
        ):  # by another task, just now; upstream's run loop waits for the resume before it steps again
            return None, NOTHING, 0.0, self.step_count
        self._notice_new_weights()
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        self._output.ended += [request for request, _ in plan.failures]
        if not plan.chunks:
            assert len(self.scheduler.queues) == 0, "requests are alive, but none can run"
            return None, plan, 0.0, self.step_count
        result = await self._compute(plan)
        self._output.ended += self.scheduler.commit(plan.chunks, result.tokens)
        self.step_count += 1
        return result, plan, time.perf_counter() - started, self.step_count

    async def _compute(self, plan: StepPlan) -> StepResult:
        """Everything of a step that can fail: then nothing of it counts."""
        try:
            self.context.stage(plan.chunks)
            result = await self.controller.async_generate_output_tokens_dynamic_batch()
            self.context.finish_snapshots(plan.chunks)
        except BaseException as error:
            self.scheduler.abandon(plan.chunks, describe(error))
            if isinstance(error, RestoreError):  # the next step computes what this snapshot was to save
                self.scheduler.cache.states.drop(error.digest)
            raise
        finally:
            self.context.clear_step()
        return result

    # The prefix cache

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prefill tokens computed, for the first time or again, all requests."""
        return self.scheduler.counters.prefill_tokens

    @property
    def lifetime_skipped_token_count(self) -> int:
        """Prompt tokens that no layer computed, all requests."""
        return self.scheduler.counters.skipped_tokens

    def reset_prefix_cache(self) -> None:
        """Empty the cache: nothing cached before is matched after, and requests in flight publish nothing."""
        self.scheduler.reset_prefix_cache()

    def weights_changed(self) -> None:
        """Say that the model's weights have been written in place (an RL refit); loaders of ours do it themselves."""
        mark_weights_changed(self._model)
        self._notice_new_weights()

    def prefix_cache_statistics(self) -> dict[str, int] | None:
        """The `prefix_cache` object of the JSON output; None if nothing is cached."""
        return prefix_cache_statistics(self.scheduler)

    def hottest_prefixes(self, count: int) -> list[CachedPrefix]:
        """The cached prefixes that most requests resumed from, the hottest first."""
        return self.scheduler.cache.hottest(count)

    @property
    def _model(self) -> nn.Module:
        return self.controller.inference_wrapped_model.model

    def _notice_new_weights(self) -> None:
        if self.scheduler.cache.is_enabled and self._weights.has_changed():
            self.scheduler.weights_changed()

    async def async_bookkeep(
        self, step_result: StepResult | None, context_state: StepPlan, step_time: float, step_count: int
    ) -> dict:
        """Turn the step's tokens into output, and report who has ended. Nothing in here stops the engine.

        Returns:
            active_request_ids: requests that computed something and go on; finished_request_records: everything that
            ended since the last step; step_time in seconds; cuda_graph_request_count: None.
        """
        if step_result is not None:
            self._output.take([chunk.request for chunk in context_state.chunks], step_result)
        records = self._output.report()
        with self.faults.absorbed("the log line of a step"):
            self._log_step(context_state, step_time)
        return {
            "active_request_ids": [c.request.request_id for c in context_state.chunks if not c.request.is_ended],
            "finished_request_records": records,
            "step_time": step_time,
            "cuda_graph_request_count": None,
        }

    def _log_step(self, plan: StepPlan, step_time: float) -> None:
        interval = self.inference_logging_step_interval
        if interval and plan.chunks and self.step_count % interval == 0:
            ended = self._output.reported_count
            log_step(self.scheduler, plan, step_count=self.step_count, step_time=step_time, ended=ended)

    def generate(
        self, prompts: Iterable[str | Sequence[int]], sampling_params: RequestParams | SamplingParams | None = None
    ) -> list[RequestRecord]:
        """Serve a list of prompts to the end; records in the same order.

        Raises:
            EngineSuspendedError: The engine is suspended. Nothing has been queued.
            ConfigError: A prompt or the parameters make no sense. None of the prompts is served.
        """
        if self.is_suspended:
            raise EngineSuspendedError("the engine is suspended; call resume() before generate()")
        ids: list[int] = []
        try:
            for prompt in prompts:
                request_id = int(next(self.request_counter))
                self.add_request(request_id, prompt, sampling_params)
                ids.append(request_id)
        except Exception:
            for request_id in ids:
                self.abort_request(request_id)
            raise
        records = {}
        while self.has_unfinished_requests():
            for record in self.step_modern()["finished_request_records"]:
                records[record.request_id] = record
        return [records[request_id] for request_id in ids]

    # The pools come and go

    def suspend(self) -> None:
        """Free the pools' memory. Living requests wait, and keep their tokens; nothing steps until `resume`."""
        if self.is_suspended:
            return
        self.scheduler.suspend()
        self.context.deallocate_all_tensors()
        self.is_suspended = True

    def resume(self) -> None:
        """Allocate the pools again; the requests compute what they had computed before, and go on."""
        if not self.is_suspended:
            return
        self.context.allocate_all_tensors(is_init=False)
        self.is_suspended = False
        self._wake_up()

    def check(self) -> None:
        """Assert every invariant of requests and pools."""
        self.scheduler.check()
        known = {id(request) for request in self._output.requests()}
        assert {id(request) for request in [*self.scheduler.queues, *self._output.ended]} == known, "lost requests"
