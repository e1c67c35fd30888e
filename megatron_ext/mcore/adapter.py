"""The engine as Megatron sees it: `DynamicInferenceEngine`'s constructor, loop names and coroutines over ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineSuspendedError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import Counter
from megatron.core.utils import get_asyncio_loop
from torch import nn

from megatron_ext.config import RequestParams
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.faults import Faults
from megatron_ext.engine.result import Step, StepResult
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.leading import make_engine
from megatron_ext.mcore.params import to_request_params
from megatron_ext.mcore.weights import WeightsWatch, mark_weights_changed
from megatron_ext.memory.budget import Geometry
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.ranks.fleet import Fleet, FleetStep
from megatron_ext.ranks.team import Team
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


class InferenceEngine(DynamicInferenceEngine):
    """`DynamicInferenceEngine` around our `Engine`, which does the work.

    A step gives way to other tasks of the event loop only before it begins: whatever calls `add_request`,
    `abort_request` or `suspend` meets a consistent state.

    Args:
        controller: Ours.
        context: Ours.
        random_seed: Requests without a seed of their own get one derived from it and their id.
        inference_logging_step_interval: Log a line every so many steps; 0 is never.
        team: All ranks, of which this is the first; None for a world of one.
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
        team: Team | None = None,
    ) -> None:
        self._team = team
        super().__init__(
            controller,
            context,
            random_seed=random_seed,
            enable_chunked_prefill=context.plan.limits.chunked_prefill,
            inference_logging_step_interval=inference_logging_step_interval,
        )

    def create_cuda_graphs(self, reset_context: bool = True) -> None:
        """Make the programs of steps where the settings ask for them; a model that asks for upstream's is refused."""
        if self.cuda_graph_impl == "local":
            raise ConfigError("cuda_graph_impl 'local' is not supported by this engine; BatchingConfig has its own")
        self.context.prepare_programs()

    engine: Engine | Fleet  # a new one after each `reset`

    def reset(self) -> None:
        """Forget all requests (their futures are cancelled) and counters; a suspended engine gets its pools back."""
        if hasattr(self, "engine"):
            self.engine.cancel()
        self.engine = make_engine(self._team, self.context, self.controller, self.random_seed)
        self.context.attach(self.engine.scheduler)
        self.context.reset()
        self.context.allocate_all_tensors(is_init=False)
        self.request_counter = Counter()
        self.rank = torch.distributed.get_rank()
        self.weights = WeightsWatch(self._model)
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
        assert not self.has_unfinished_requests(), "requests are alive, and their futures belong to another loop"
        self._loop = get_asyncio_loop(loop)

    # What there is

    @property
    def geometry(self) -> Geometry:
        """Effective sizes of the pools, of all ranks together."""
        return self.context.plan.world

    @property
    def longest_request_state_bytes(self) -> int:
        """Bytes of recurrent states that a request of the longest possible prompt takes at most."""
        return self.context.plan.request_state_bytes(self.context.max_sequence_length)

    @property
    def scheduler(self) -> Scheduler:
        """Queues, blocks, live slots."""
        return self.engine.scheduler

    @property
    def faults(self) -> Faults:
        """What went wrong beside the steps themselves."""
        return self.engine.faults

    @property
    def step_count(self) -> int:
        """Steps that have been computed."""
        return self.engine.step_count

    @property
    def waiting_request_ids(self) -> list[int]:
        """Ids of the requests that wait for admission, and of ended ones still to be reported by a step."""
        return [request.request_id for request in self.engine.waiting()]

    @property
    def finished_request_count(self) -> int:
        """Requests that have been reported as ended."""
        return self.engine.ended_count

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prefill tokens computed, for the first time or again, all requests."""
        return self.engine.counters.prefill_tokens

    @property
    def lifetime_skipped_token_count(self) -> int:
        """Prompt tokens that no layer computed, all requests."""
        return self.engine.counters.skipped_tokens

    def statistics(self) -> EngineStatistics:
        """Everything that is counted, at once."""
        return self.engine.statistics()

    def prefix_cache_statistics(self) -> dict[str, int] | None:
        """The `prefix_cache` object of the JSON output; None if nothing is cached."""
        return self.statistics().prefix_cache()

    def hottest_prefixes(self, count: int) -> list[CachedPrefix]:
        """The cached prefixes that most requests resumed from, the hottest first."""
        return self.engine.hottest(count)

    # Requests come and go

    def add_request(
        self,
        request_id: int,
        prompt: str | Sequence[int] | torch.Tensor,
        sampling_params: RequestParams | SamplingParams | None = None,
        *,
        prompt_text: str | None = None,
        turn: int | None = None,
    ) -> asyncio.Future[RequestRecord]:
        """Queue a request. What can never be served ends at once, as FAILED; the others go on.

        Args:
            request_id: Not in use by a living request.
            prompt: Text, or token ids.
            sampling_params: Ours or Megatron's; greedy if missing.
            prompt_text: That the ids were made of, for the record; the engine makes none of ids.
            turn: Of R replicas the one with this number, modulo R, serves it; by default they take turns.

        Returns:
            A future of the request's record; the step that ends the request reports it too.

        Raises:
            ConfigError: The prompt or the parameters make no sense, whatever the engine's limits.
        """
        self.engine.check_free(request_id)
        text = prompt if isinstance(prompt, str) else prompt_text
        ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        tokens = self.engine.tokenize(ids, getattr(sampling_params, "add_BOS", False))
        params = to_request_params(sampling_params, len(tokens), self.context.max_sequence_length)
        future = self._loop.create_future()
        self.engine.add(request_id, tokens, params, future, text=text, turn=turn)
        self._wake_up()
        return future

    def abort_request(self, request_id: int) -> None:
        """End a living request now; its blocks and its live slot are free at once (EX-8). Others do not notice.

        Raises:
            KeyError: No living request has this id.
        """
        if self.engine.abort(request_id):
            self._wake_up()

    def fail_request(self, request_id: int, error: Exception) -> None:
        """End a living request as FAILED, because what only it needed has raised. Others do not notice.

        Raises:
            KeyError: No living request has this id.
        """
        self.engine.fail(request_id, error)
        self._wake_up()

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or report anything."""
        return self.engine.is_busy

    def get_request(self, request_id: int) -> Request:
        """A living request."""
        return self.engine.get(request_id)

    def _wake_up(self) -> None:
        """Let upstream's run loop, if it waits, look again."""
        self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    # Steps

    async def async_forward(self) -> tuple[StepResult | None, Step | FleetStep, float, int]:
        """Schedule, compute, sample and commit one step; see `Engine.compute`.

        Returns:
            Result (None if nothing was to be computed), step, seconds, step count: arguments of `async_bookkeep`.

        Raises:
            EngineSuspendedError: The engine is suspended.
        """
        if self.is_suspended:
            raise EngineSuspendedError("the engine is suspended; call resume() before a step")
        await asyncio.sleep(0)
        if self.is_suspended:  # by another task, just now; upstream's run loop waits for the resume
            return None, self.engine.no_step, 0.0, self.step_count
        self._notice_new_weights()
        step = self.engine.compute()
        return step.result, step, step.seconds, self.step_count

    async def async_bookkeep(
        self, step_result: StepResult | None, context_state: Step | FleetStep, step_time: float, step_count: int
    ) -> dict[str, object]:
        """Turn the step's tokens into output, and report who has ended. Nothing in here stops the engine.

        Returns:
            active_request_ids: requests that computed something and go on; finished_request_records: everything that
            ended since the last step; step_time in seconds; cuda_graph_request_count: None.
        """
        interval = self.inference_logging_step_interval
        records = self.engine.report(context_state, interval)  # type: ignore[arg-type]  # a step of its own
        return {
            "active_request_ids": [c.request.request_id for c in context_state.chunks if not c.request.is_ended],
            "finished_request_records": records,
            "step_time": step_time,
            "cuda_graph_request_count": None,
        }

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

    def idle(self) -> None:
        """There is nothing to do for now: other ranks, if there are any, hear that this one lives."""
        self.engine.idle()

    def close(self) -> None:
        """No step will follow: other ranks, if there are any, stop."""
        self.engine.close()

    # The prefix cache

    def reset_prefix_cache(self) -> None:
        """Empty the cache: nothing cached before is matched after, and requests in flight publish nothing."""
        self.engine.reset_prefix_cache()

    def weights_changed(self) -> None:
        """Say that the model's weights have been written in place (an RL refit); loaders of ours do it themselves."""
        mark_weights_changed(self._model)
        self._notice_new_weights()

    def _notice_new_weights(self) -> None:
        is_watching = self.engine.is_caching or self.context.fixed_steps is not None
        if is_watching and self.weights.has_changed():
            self.engine.weights_changed()
            self.context.notice_new_weights()

    @property
    def _model(self) -> nn.Module:
        return self.controller.inference_wrapped_model.model

    # The pools come and go

    def suspend(self) -> None:
        """Free the pools' memory. Living requests wait, and keep their tokens; nothing steps until `resume`."""
        if self.is_suspended:
            return
        self.engine.suspend()
        self.context.deallocate_all_tensors()
        self.is_suspended = True

    def resume(self) -> None:
        """Allocate the pools again; the requests compute what they had computed before, and go on."""
        if not self.is_suspended:
            return
        self.context.allocate_all_tensors(is_init=False)
        self.create_cuda_graphs()
        self.is_suspended = False
        self.engine.resume()
        self._wake_up()

    def check(self) -> None:
        """Assert every invariant of requests and pools."""
        self.engine.check()
