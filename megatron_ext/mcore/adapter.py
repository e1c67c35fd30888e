"""Megatron's names for the engine: constructor, loop names and coroutines of `DynamicInferenceEngine`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.inference.engines.dynamic_engine import EngineSuspendedError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import Counter
from megatron.core.utils import get_asyncio_loop

from megatron_ext.config import RequestParams
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.result import EngineStep, StepResult, active_requests
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.core_factory import make_core
from megatron_ext.mcore.inference_request import to_request_params
from megatron_ext.mcore.versions import Engine
from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs


@dataclass(frozen=True)
class DecodeOnly:
    """State of steps, whether they only decode, under the names of 0.19; false without a step.

    Attributes:
        consumed: State of the last step; None before the first one.
        launched: State of a step without its tokens; always None, as in Megatron without asynchronous scheduling.
    """

    consumed: bool | None = None
    launched: bool | None = None

    def __bool__(self) -> bool:
        return bool(self.consumed)


class RequestedParams(NamedTuple):
    """Parameters of a request.

    Attributes:
        given: As the caller gave them; None for the defaults.
        resolved: As the engine serves them.
    """

    given: RequestParams | SamplingParams | None
    resolved: RequestParams


class InferenceEngine(Engine):
    """`DynamicInferenceEngine` over an `EngineCore`, which does the work.

    Meant for callers that know Megatron's names; our own callers use `core` through an `EngineClient`. A step yields to
    other tasks of the event loop only before it begins, so `add_request`, `abort_request` and `suspend` find a
    consistent state.

    Args:
        controller: Model, tokenizer and sampling.
        context: Pools and plan.
        random_seed: Requests without a seed get one derived from this seed and their id.
        inference_logging_step_interval: Steps between two log lines; see `StepLog`.
        parallel_context: All ranks, of which this is the first; None for a world of one.
        routing: Policy that chooses the replica of a request; see `EngineCore`.

    Attributes:
        core: The engine; `reset` replaces it.
        decode_only: Whether the last step only decoded.
        capture_stats: Seconds that CUDA graphs took to capture, by the key `time`; None without graphs.
        present: Returns what callers get of a request that has ended; None for its record.
    """

    context: InferenceContext
    controller: InferenceController
    core: EngineCore
    decode_only = DecodeOnly()
    capture_stats: dict[str, float] | None = None
    present: Callable[[RequestRecord, RequestedParams], RequestRecord] | None = None

    def __init__(
        self,
        controller: InferenceController,
        context: InferenceContext,
        random_seed: int = 1234,
        *,
        inference_logging_step_interval: int | None = 0,
        parallel_context: ParallelContext | None = None,
        routing: RoutingConfig | None = None,
    ) -> None:
        self._parallel_context, self._routing = parallel_context, routing
        self._logging_interval = inference_logging_step_interval
        super().__init__(controller, context, random_seed, inference_logging_step_interval or 0)  # not upstream's log

    def create_cuda_graphs(self, reset_context: bool = True) -> None:
        """Capture the CUDA graphs that the settings ask for; upstream's own graphs are refused."""
        if self.cuda_graph_impl == "local":
            raise ConfigError("cuda_graph_impl 'local' is not supported by this engine; BatchingConfig has its own")
        started = time.perf_counter()
        self.context.prepare_cuda_graphs()
        if self.context.cuda_graph_runner is not None:
            self.capture_stats = {"time": time.perf_counter() - started}

    def reset(self) -> None:
        """Drop all requests (cancelling their futures), the cache and counters; allocate freed pools again.

        Where there is a store, entries of the cache are kept on disk for the next start; later entries will be, too.
        """
        disk = None
        weights_version = self.core.weights_version if hasattr(self, "core") else 0
        if hasattr(self, "core"):
            self.core.cancel()
            disk = self.core.disk
            for future in self._futures.values():
                future.cancel()
        self._futures: dict[int, asyncio.Future[RequestRecord]] = {}  # by request id
        self._asked: dict[int, RequestedParams] = {}  # by request id
        interval = self._logging_interval
        self.core = make_core(
            self._parallel_context, self.context, self.controller, self.random_seed, interval, self._routing
        )
        self.core.continue_from(weights_version)
        self.context.attach(self.core)
        self.context.reset()
        self.context.allocate_all_tensors(is_init=False)
        if disk is not None:
            self.core.attach_disk(lambda: disk)
        self.request_counter = Counter()
        self.rank = torch.distributed.get_rank()
        self._loop = get_asyncio_loop(getattr(self, "_loop", None))
        self.reset_loop_state()
        self.decode_only = DecodeOnly()

    @property
    def is_decode_only(self) -> bool:
        """True if the last step only decoded (0.16.1's name)."""
        return bool(self.decode_only)

    @property
    def is_suspended(self) -> bool:
        """True if the pools have been freed."""
        return self.core.is_suspended

    # Numbers

    @property
    def plan(self) -> EnginePlan:
        """Sizes of all pools, and limits."""
        return self.context.plan

    @property
    def step_count(self) -> int:
        """Number of computed steps."""
        return self.core.step_count

    @property
    def waiting_request_ids(self) -> list[int]:
        """Ids of the requests that wait for admission, and of ended requests that a step has yet to report."""
        waiting = [one for replica in self.core.replicas for one in replica.scheduler.queues.waiting]
        return [one.request_id for one in [*waiting, *self.core.output.ended]]

    @property
    def finished_request_count(self) -> int:
        """Number of requests that have been reported as ended."""
        return self.core.output.reported_count

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prefill tokens computed by all requests, recomputed tokens included."""
        return self.core.counters.prefill_tokens

    # Request lifecycle

    def add_request(
        self,
        request_id: int,
        prompt: str | Sequence[int] | torch.Tensor,
        sampling_params: RequestParams | SamplingParams | None = None,
        *,
        replica_index: int | None = None,
    ) -> asyncio.Future[RequestRecord]:
        """Queue a request. A request that can never be served ends at once as FAILED; the other requests continue.

        Args:
            request_id: Id that no living request uses.
            prompt: Text or token ids.
            sampling_params: Our parameters or Megatron's; greedy if missing.
            replica_index: Replica, modulo their number, that serves the request; by default the policy chooses one.

        Returns:
            A future of the request's record; the step that ends the request reports the record too.

        Raises:
            ConfigError: The prompt or the parameters are invalid regardless of the engine's limits.
        """
        text = prompt if isinstance(prompt, str) else None
        ids = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        tokens = self.core.tokenize(ids, getattr(sampling_params, "add_BOS", False))
        params = to_request_params(sampling_params, len(tokens), self.context.max_sequence_length)
        self.core.add(request_id, RequestInputs(tokens, params, text), replica_index=replica_index)
        self._asked[request_id] = RequestedParams(sampling_params, params)
        future = self._futures[request_id] = self._loop.create_future()
        self._wake_up()
        return future

    def abort_request(self, request_id: int) -> None:
        """End a living request now; its blocks and its running state slot are free at once (EX-8).

        Raises:
            KeyError: No living request has this id.
        """
        if self.core.output.abort(self.core.output.get(request_id)):
            self._wake_up()

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would compute or report anything."""
        return self.core.is_busy

    def get_request(self, request_id: int) -> Request:
        """Return a living request."""
        return self.core.output.get(request_id)

    def _wake_up(self) -> None:
        """Wake upstream's run loop if it is waiting for requests."""
        self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    # Steps

    async def async_forward(self) -> tuple[object, ...]:
        """Schedule, compute, sample and commit one step; see `EngineCore.compute`.

        Returns:
            Result of replica 0 (None if nothing was computed), step, seconds, and with 0.16 step count: the arguments
            of `async_bookkeep`.

        Raises:
            EngineSuspendedError: The engine is suspended.
        """
        if self.is_suspended:
            raise EngineSuspendedError("the engine is suspended; call resume() before a step")
        await asyncio.sleep(0)
        if self.is_suspended:  # suspended by another task meanwhile; upstream's run loop waits for the resume
            return (None, EngineStep(), 0.0, self.step_count)[: self.step_data]
        step = self.core.compute()
        self.decode_only = DecodeOnly(consumed=bool(step.chunks) and all(chunk.is_decode for chunk in step.chunks))
        return (step.parts[0].result, step, step.seconds, self.step_count)[: self.step_data]

    async def async_bookkeep(
        self, step_result: StepResult | None, context_state: EngineStep, step_time: float, step_count: int = 0
    ) -> dict[str, object]:
        """Turn the step's tokens into output and report ended requests. No error in here stops the engine.

        Returns:
            active_request_ids: requests that computed something and continue; finished_request_records: all requests
                that ended since the last step; step_time in seconds; cuda_graph_request_count: rows of the
                step's CUDA graph, None for an eager step.
        """
        records = [self._presented(record) for record in self.core.report(context_state)]
        for record in records:
            future = self._futures.pop(record.request_id, None)
            with self.core.error_isolation.guard("the future of a request"):
                if future is not None and not future.done():
                    future.set_result(record)
        return {
            "active_request_ids": [request.request_id for request in active_requests(context_state)],
            "finished_request_records": records,
            "step_time": step_time,
            "cuda_graph_request_count": None if step_result is None else step_result.graph_rows,
        }

    def _presented(self, record: RequestRecord) -> RequestRecord:
        asked = self._asked.pop(record.request_id, None)
        if asked is None or self.present is None:  # without parameters: added by other code
            return record
        return self.present(record, asked)

    def generate(
        self, prompts: Iterable[str | Sequence[int]], sampling_params: RequestParams | SamplingParams | None = None
    ) -> list[RequestRecord]:
        """Serve a list of prompts to the end; the records are in the same order.

        Raises:
            EngineSuspendedError: The engine is suspended. Nothing has been queued.
            ConfigError: A prompt or the parameters are invalid. None of the prompts is served.
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

    def close(self) -> None:
        """Stop the other ranks, if there are any; no step may follow."""
        self.core.close()

    # Prefix cache

    def reset_prefix_cache(self) -> None:
        """Empty the cache: later requests match nothing cached before, and requests in flight publish nothing."""
        self.core.reset_prefix_cache()

    def weights_changed(self) -> None:
        """Invalidate the cache after the model's weights were written in place (an RL refit); our loaders call this.

        Requests in flight keep their tokens and compute keys, values and states again.
        """
        self.core.weights_changed()

    # Pool lifecycle

    def suspend(self) -> None:
        """Stop until `resume`, at the level of `kv_cache_management_mode`. Living requests keep their tokens."""
        self.core.suspend()

    def resume(self) -> None:
        """Allocate the pools again; the requests recompute dropped keys, values and states, and continue."""
        self.core.resume()
        self._wake_up()

    def check(self) -> None:
        """Assert every invariant of requests and pools."""
        self.core.check()
