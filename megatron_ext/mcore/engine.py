"""The engine: requests in, one step at a time, records out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineSuspendedError
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import Counter
from megatron.core.utils import get_asyncio_loop
from torch import nn

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError, RestoreError
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController, ScoredToken, StepResult
from megatron_ext.mcore.params import to_request_params
from megatron_ext.mcore.weights import mark_weights_changed, weights_version
from megatron_ext.memory.budget import Geometry
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.scheduling.planner import StepPlan, check_admissible
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.stopping import StopWordMatcher

logger = logging.getLogger(__name__)

NOTHING = StepPlan(evictions=(), pauses=(), resumes=(), failures=(), admissions=(), chunks=(), refusals=())


class InferenceEngine(DynamicInferenceEngine):
    """`DynamicInferenceEngine` over a scheduler on the host.

    A step is schedule -> stage -> forward and sample -> commit -> bookkeeping, and gives way to other tasks of the
    event loop only before it begins: whatever calls `add_request`, `abort_request` or `suspend` meets a consistent
    state.

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
        for future in getattr(self, "_futures", {}).values():
            future.cancel()
        self.context.reset()
        self.context.allocate_all_tensors(is_init=False)
        self.request_counter = Counter()
        self.rank = torch.distributed.get_rank()
        self.step_count = 0
        self.lifetime_prefill_token_count = 0
        self._seen_weights_version = weights_version(self._model)
        self.finished_request_count = 0
        self._requests: dict[int, Request] = {}
        self._futures: dict[int, asyncio.Future[RequestRecord]] = {}
        self._stop_words: dict[int, StopWordMatcher] = {}
        self._ended: list[Request] = []  # since the last step's report
        self._next_arrival = 0
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
        assert not self._requests, "requests are alive, and their futures belong to another loop"
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
    def scheduler(self) -> object:
        """The context's scheduler: queues, blocks, live rows."""
        return self.context.scheduler

    @property
    def waiting_request_ids(self) -> list[int]:
        """Ids of the requests that wait for admission, and of ended ones still to be reported by a step."""
        return [request.request_id for request in [*self.context.scheduler.queues.waiting, *self._ended]]

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
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id} is in use; choose another")
        text = prompt if isinstance(prompt, str) else None
        tokens = self._tokenize(prompt, getattr(sampling_params, "add_BOS", False))
        params = to_request_params(sampling_params, len(tokens), self.context.max_sequence_length)
        request = self._new_request(request_id, text, tokens, params)
        error = check_admissible(request, self.context.limits)
        if error is None:
            self.context.scheduler.add(request)
        else:
            request.end(Status.FAILED, error=f"this prompt cannot be served: {error}")
            self._ended.append(request)
        self._wake_up()
        return self._futures[request_id]

    def _tokenize(self, prompt: str | Sequence[int] | torch.Tensor, add_bos: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = self.controller.tokenize_prompt(prompt, add_bos)
        tokens = tuple(int(token) for token in (prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt))
        vocabulary = self.controller.inference_wrapped_model.inference_wrapper_config.padded_vocab_size
        if not tokens:
            raise ConfigError("the prompt is empty; it needs at least one token")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            bad = next(token for token in tokens if not 0 <= token < vocabulary)
            raise ConfigError(
                f"token id {bad} is not in the vocabulary of {vocabulary}; ids go from 0 to {vocabulary - 1}"
            )
        return tokens

    def _new_request(
        self, request_id: int, text: str | None, tokens: tuple[int, ...], params: RequestParams
    ) -> Request:
        termination = self.controller.tokenizer.eod if params.termination_id is None else params.termination_id
        request = Request(
            request_id=request_id,
            prompt_tokens=tokens,
            params=params,
            arrival=self._next_arrival,
            seed=params.seed if params.seed is not None else f"{self.random_seed}/{request_id}",
            termination_id=None if params.ignore_eos else termination,
            prompt_text=text,
        )
        self._next_arrival += 1
        self._requests[request_id] = request
        self._futures[request_id] = self._loop.create_future()
        if params.stop_words:
            detokenize = self.controller.tokenizer.detokenize
            with_special_tokens = partial(detokenize, skip_special_tokens=False)
            self._stop_words[request_id] = StopWordMatcher(params.stop_words, with_special_tokens, detokenize)
        return request

    def abort_request(self, request_id: int) -> None:
        """End a living request now; its blocks and its live row are free at once (EX-8). Others do not notice.

        Raises:
            KeyError: No living request has this id.
        """
        request = self._requests[request_id]
        if not request.is_ended:
            self.context.scheduler.end(request, Status.ABORTED)
            self._ended.append(request)
            self._wake_up()

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or report anything."""
        return bool(self._requests)

    def get_request(self, request_id: int) -> Request:
        """A living request."""
        return self._requests[request_id]

    def _wake_up(self) -> None:
        """Let upstream's run loop, if it waits, look again."""
        self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    # Steps

    async def async_forward(self) -> tuple[StepResult | None, StepPlan, float, int]:
        """Schedule, compute and sample one step.

        If the forward raises, its requests go back to wait (their pools may hold anything) and the error is passed on;
        a later step computes them again.

        Returns:
            Result (None if nothing was to be computed), plan, seconds, step count: arguments of `async_bookkeep`.

        Raises:
            EngineSuspendedError: The engine is suspended.
        """
        if self.is_suspended:
            raise EngineSuspendedError(self.step_count)
        await asyncio.sleep(0)
        if (
            self.is_suspended
        ):  # by another task, just now; upstream's run loop waits for the resume before it steps again
            return None, NOTHING, 0.0, self.step_count
        scheduler = self.context.scheduler
        self._notice_new_weights()
        started = time.perf_counter()
        plan = scheduler.schedule()
        self._ended += [request for request, _ in plan.failures]
        if not plan.chunks:
            assert len(scheduler.queues) == 0, "requests are alive, but none can run"
            return None, plan, 0.0, self.step_count
        try:
            self.context.stage(plan.chunks)
            result = await self.controller.async_generate_output_tokens_dynamic_batch()
        except BaseException as error:
            scheduler.abandon(plan.chunks, f"{type(error).__name__}: {error}")
            if isinstance(error, RestoreError):  # the next step computes what this snapshot was to save
                scheduler.cache.states.drop(error.digest)
            raise
        finally:
            self.context.clear_step()
        self._commit(plan)
        self.step_count += 1
        return result, plan, time.perf_counter() - started, self.step_count

    def _commit(self, plan: StepPlan) -> None:
        requests = [chunk.request for chunk in plan.chunks]
        before = sum(request.prefill_token_count for request in requests)
        self.context.finish_snapshots(plan.chunks)
        self.context.scheduler.commit(plan.chunks)
        self.lifetime_prefill_token_count += sum(request.prefill_token_count for request in requests) - before

    # The prefix cache

    @property
    def lifetime_skipped_token_count(self) -> int:
        """Prompt tokens that no layer computed, all requests."""
        return self.context.scheduler.counters.skipped_tokens

    def reset_prefix_cache(self) -> None:
        """Empty the cache: nothing cached before is matched after, and requests in flight publish nothing."""
        self.context.scheduler.reset_prefix_cache()

    def weights_changed(self) -> None:
        """Say that the model's weights have been written in place (an RL refit); loaders of ours do it themselves."""
        mark_weights_changed(self._model)
        self._notice_new_weights()

    def prefix_cache_statistics(self) -> dict[str, int] | None:
        """The `prefix_cache` object of the JSON output; None if nothing is cached."""
        scheduler = self.context.scheduler
        if not scheduler.cache.is_enabled:
            return None
        use, counters = scheduler.cache.use(), scheduler.counters
        return {
            "blocks_total": use.blocks_total,
            "blocks_cached": use.blocks_cached,
            "blocks_evictable": use.blocks_evictable,
            "blocks_in_use": use.blocks_in_use,
            "slots_total": use.slots_total,
            "slots_used": use.slots_used,
            "hits": counters.hits,
            "blocks_evicted": use.blocks_evicted,
            "slots_evicted": use.slots_evicted,
            "snapshots_taken": use.snapshots_taken,
            "snapshots_skipped": use.snapshots_skipped,
            "snapshots_replaced": use.snapshots_replaced,
            "coordination_waits": counters.coordination_waits,
        }

    def hottest_prefixes(self, count: int) -> list[CachedPrefix]:
        """The cached prefixes that most requests resumed from, the hottest first."""
        return self.context.scheduler.cache.hottest(count)

    @property
    def _model(self) -> nn.Module:
        return self.controller.inference_wrapped_model.model

    def _notice_new_weights(self) -> None:
        version = weights_version(self._model)
        if version != self._seen_weights_version:
            self._seen_weights_version = version
            self.context.scheduler.weights_changed()

    async def async_bookkeep(
        self, step_result: StepResult | None, context_state: StepPlan, step_time: float, step_count: int
    ) -> dict:
        """Hand out tokens, end requests, report.

        Returns:
            active_request_ids: requests that computed something and go on; finished_request_records: everything that
            ended since the last step; step_time in seconds; cuda_graph_request_count: None.
        """
        if step_result is not None:
            self._record_scores(step_result)
            for chunk, scored in step_result.generated:
                self._extend(chunk.request, scored)
        records = [self._report(request) for request in self._ended]
        self._ended = []
        self._log_progress(context_state, step_time)
        return {
            "active_request_ids": [c.request.request_id for c in context_state.chunks if not c.request.is_ended],
            "finished_request_records": records,
            "step_time": step_time,
            "cuda_graph_request_count": None,
        }

    @staticmethod
    def _record_scores(result: StepResult) -> None:
        """Log-probs of prompt tokens; the first generated token has none before it."""
        for request, scores in result.prompt_scores:
            request.prompt_log_probs += [score.log_prob for score in scores]
            request.prompt_top_n += [score.top_n for score in scores]

    def _extend(self, request: Request, scored: ScoredToken) -> None:
        """A request got its next token; end it if that was the last."""
        may_stop = request.may_stop
        request.append(scored.token)
        if scored.log_prob is not None:
            request.generated_log_probs.append(scored.log_prob)
            request.generated_top_n.append(scored.top_n)
        reason = self._finish_reason(request, may_stop)
        if reason is not None:
            self.context.scheduler.end(request, Status.COMPLETED, finish_reason=reason)
            self._ended.append(request)

    def _finish_reason(self, request: Request, may_stop: bool) -> str | None:
        if may_stop and request.tokens[-1] == request.termination_id:
            return "stop"
        matcher = self._stop_words.get(request.request_id)
        if matcher is not None:
            request.generated_text = matcher.find(request.generated_tokens, ignore=not may_stop)
            if request.generated_text is not None:
                return "stop"
        return "length" if request.generated_count >= request.params.num_tokens_to_generate else None

    def _report(self, request: Request) -> RequestRecord:
        """Close the books on an ended request."""
        del self._requests[request.request_id]
        self._stop_words.pop(request.request_id, None)
        detokenize = self.controller.tokenizer.detokenize
        text = request.generated_text
        if text is None:
            tokens = request.generated_tokens
            ends_with_termination = bool(tokens) and tokens[-1] == request.termination_id
            text = detokenize(tokens[:-1] if ends_with_termination else tokens)
        prompt_text = detokenize(list(request.prompt_tokens)) if request.prompt_text is None else request.prompt_text
        record = request.to_record(text, prompt_text)
        self.finished_request_count += 1
        future = self._futures.pop(request.request_id)
        if not future.done():
            future.set_result(record)
        return record

    def _log_progress(self, plan: StepPlan, step_time: float) -> None:
        interval = self.inference_logging_step_interval
        if not interval or not plan.chunks or self.step_count % interval:
            return
        queues, use = self.context.scheduler.queues, self.context.scheduler.cache.use()
        computed, skipped = self.lifetime_prefill_token_count, self.lifetime_skipped_token_count
        logger.info(
            "step %d: %.3f s, %d decode + %d prefill tokens | requests: %d running, %d paused, %d waiting, %d ended | "
            "KV blocks: %d of %d in use, %d cached, %d evictable | state slots: %d of %d used | "
            "prefill tokens: %d computed, %d skipped (%.1f%%)",
            self.step_count,
            step_time,
            sum(chunk.is_decode for chunk in plan.chunks),
            sum(chunk.length for chunk in plan.chunks if not chunk.is_decode),
            len(queues.running),
            len(queues.paused),
            len(queues.waiting),
            self.finished_request_count,
            use.blocks_in_use,
            use.blocks_total,
            use.blocks_cached,
            use.blocks_evictable,
            use.slots_used,
            use.slots_total,
            computed,
            skipped,
            100 * skipped / max(1, computed + skipped),
        )

    def generate(
        self, prompts: Iterable[str | Sequence[int]], sampling_params: RequestParams | SamplingParams | None = None
    ) -> list[RequestRecord]:
        """Serve a list of prompts to the end; records in the same order."""
        ids = []
        for prompt in prompts:
            ids.append(int(next(self.request_counter)))
            self.add_request(ids[-1], prompt, sampling_params)
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
        self.context.scheduler.suspend()
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
        self.context.scheduler.check()
        known = {id(request) for request in self._requests.values()}
        assert {id(request) for request in [*self.context.scheduler.queues, *self._ended]} == known, "lost requests"
