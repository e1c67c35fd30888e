"""Engine of `MegatronLLM` on the rank that takes requests: its prompts, its states, and views of it.

Reading views is safe in any thread; requests and the lifecycle go through `MegatronLLM`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.api.engine import LoadedEngine, serve, serve_async
from megatron_ext.apis.http_frontend import HttpFrontend, ServeConfig
from megatron_ext.apis.inference_config import EngineOptions
from megatron_ext.apis.state_log import Change, State, StateLog
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.errors import EngineClosed, RankError
from megatron_ext.mcore import platform
from megatron_ext.mcore.inference_request import DynamicInferenceRequest, RequestConversion, to_request_params
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.tokenizer import Tokenizer, tokenize_prompt

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | list[int]


def conversion_for(engine: LLMEngine, *, has_pause_events: bool) -> RequestConversion:
    """Return the conversion of an engine's records."""
    return RequestConversion(
        detokenize=engine.vocabulary.detokenize,
        eod=engine.tokenizer.eod,
        block_size=engine.limits.block_size,
        is_caching=engine.is_caching,
        device=platform.device(),
        has_pause_events=has_pause_events,
    )


def listed(prompts: object) -> tuple[list[Prompt], bool]:
    """Return a list of prompts, and whether there may be several; a list of numbers is one prompt.

    Raises:
        TypeError: The value is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str):
        return [prompts], False
    if not isinstance(prompts, list):
        raise TypeError(f"prompts are of type {type(prompts).__name__}; give a text, a list of token ids, or several")
    if prompts and isinstance(prompts[0], int):
        return [prompts], False
    wrong = next((one for one in prompts if not isinstance(one, str | list)), None)
    if wrong is not None:
        raise TypeError(f"a prompt is of type {type(wrong).__name__}; give a text or a list of token ids")
    return prompts, True


def context_facts(engine: LLMEngine) -> dict[str, int]:
    """Return the limits of an engine, equal on all ranks, by the names of `ContextView`."""
    limits = engine.limits
    return {
        "max_requests": limits.max_requests,
        "max_tokens": limits.max_tokens,
        "max_sequence_length": limits.max_model_len,
        "block_size_tokens": limits.block_size,
        "blocks": engine.geometry.blocks,
        "enable_prefix_caching": engine.is_caching,
        "is_hybrid_model": engine.is_hybrid,
    }


@dataclass(frozen=True)
class BlockCounts:
    """Numbers of KV blocks: in total, for running requests, and in the pool with the dummy block."""

    total_count: int
    active_count: int
    pool_size: int


class ContextView:
    """Limits and counts, under the names of `DynamicInferenceContext`.

    Args:
        facts: See `context_facts`.
        counted: The engine's counts; None on a rank without requests, where all stay zero.
    """

    unified_memory_level = 0
    cuda_graph_batch_dimensions_list = ()

    def __init__(self, facts: Mapping[str, int], counted: EngineRuntime | None) -> None:
        self._counted = counted
        self.max_requests, self.max_tokens = facts["max_requests"], facts["max_tokens"]
        self.max_sequence_length = facts["max_sequence_length"]
        self.block_size_tokens = facts["block_size_tokens"]
        self.enable_prefix_caching = facts["enable_prefix_caching"]
        self.is_hybrid_model = facts["is_hybrid_model"]
        self.kv_block_allocator = BlockCounts(facts["blocks"], facts["blocks"], facts["blocks"] + 1)

    def _progress(self) -> StepCounts:
        return StepCounts() if self._counted is None else self._counted.progress()

    @property
    def step_count(self) -> int:
        """Steps since the last reset."""
        return self._progress().steps

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prefill tokens computed since the last reset."""
        return self._progress().prefill_tokens

    @property
    def async_sched_step_count(self) -> int:
        """Steps launched before the tokens of the previous step were known."""
        return self._progress().asynchronous

    @property
    def async_sched_compaction_step_count(self) -> int:
        """Steps launched so of which rows were discarded."""
        return self._progress().discarding


class ControllerView:
    """Tokenizer, and text to tokens and back, under the names of `TextGenerationController`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @staticmethod
    def tokenize_prompt(tokenizer: Tokenizer, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of a prompt."""
        return tokenize_prompt(tokenizer, prompt, add_bos=add_BOS)


class EngineView:
    """Counts and parts, under the names of `DynamicInferenceEngine`.

    Args:
        facts: See `context_facts`.
        tokenizer: Tokenizer as the caller gave it.
        capture_stats: Seconds (`time`) of the capture of CUDA graphs; None without graphs.
    """

    def __init__(
        self,
        facts: Mapping[str, int],
        tokenizer: Tokenizer,
        counted: EngineRuntime | None,
        capture_stats: object = None,
    ) -> None:
        self.context, self.controller = ContextView(facts, counted), ControllerView(tokenizer)
        self.capture_stats = capture_stats
        self._counted = counted

    @property
    def step_count(self) -> int:
        """Steps since the last reset."""
        return self.context.step_count

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache, and count from zero; on the first rank, for all."""
        if self._counted is not None:
            self._counted.reset()


class EngineRuntime:
    """Engine with its lifecycle; all methods may be called from any thread.

    Args:
        loaded: Engine, which is closed with the runtime.
        tokenizer: Tokenizer as the caller gave it.
        log: Log of the states for the other ranks; None without any.

    Attributes:
        engine: View of the engine.
        ended: Done when the runtime has been closed; has the error if other ranks were lost before.
    """

    def __init__(
        self, loaded: LoadedEngine, options: EngineOptions, tokenizer: Tokenizer, log: StateLog | None = None
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._log = log
        self._state = State.RUNNING
        self._changing = threading.Lock()  # the state, the frontend
        self._frontend: HttpFrontend | None = None
        self._baseline = StepCounts()
        self.ended: Future[None] = Future()
        self._conversion = conversion_for(loaded, has_pause_events=options.has_pause_events)
        facts = context_facts(loaded)
        self.engine = EngineView(facts, tokenizer, self, loaded.inference_engine.capture_stats)
        if log is not None:
            log.publish(facts)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[DynamicInferenceRequest]:
        """Serve prompts to the end, and return their requests in order; they are aborted if the wait is interrupted.

        Raises:
            ConfigError: A prompt or a parameter is invalid. None of the prompts is served.
            EngineSuspended: The engine is suspended.
            EngineClosed: The engine is closed, or was closed meanwhile.
        """
        if not prompts:  # also on a suspended engine
            return []
        requests = self._requests(prompts, params)
        return self._converted(requests, serve(self._loaded.client, requests), params)

    async def generate_async(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[DynamicInferenceRequest]:
        """Serve prompts as `generate`, without blocking the event loop."""
        if not prompts:
            return []
        requests = await asyncio.to_thread(self._requests, prompts, params)
        records = await serve_async(self._loaded.client, requests)
        return await asyncio.to_thread(self._converted, requests, records, params)

    def _requests(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[EngineRequest]:
        """Return requests for prompts that share their parameters.

        A number of tokens to generate that exceeds the maximum length is reduced, with a warning, as in Megatron.
        """
        longest, has_events = self._loaded.limits.max_model_len, self._options.has_token_events
        requests = []
        for index, prompt in enumerate(prompts):
            tokens = self._loaded.tokenize(prompt, params.add_BOS)
            ours = to_request_params(params, len(tokens), longest)
            count, room = ours.num_tokens_to_generate, longest - len(tokens)
            if 0 <= room < count:
                words = "prompt %d of %d tokens leaves room for %d generated tokens, not for %d"
                logger.warning(words, index, len(tokens), room, count)
                count = room
            ours = dataclasses.replace(ours, num_tokens_to_generate=count, track_generated_token_events=has_events)
            requests.append(EngineRequest(RequestInputs(tokens, ours, prompt if isinstance(prompt, str) else None)))
        return requests

    def _converted(
        self, requests: Sequence[EngineRequest], records: Sequence[RequestRecord], params: SamplingParams
    ) -> list[DynamicInferenceRequest]:
        return [
            self._conversion.convert(record, params, one.inputs.params.num_tokens_to_generate)
            for one, record in zip(requests, records, strict=True)
        ]

    def change(self, change: Change) -> None:
        """Change the state.

        Raises:
            RuntimeError: The state refuses the change.
            EngineClosed: The engine is closed.
        """
        with self._changing:
            self._check_open()
            if self._state is change.refused:
                raise RuntimeError(change.problem)
            if self._state is change.before:
                change.call(self._loaded)
                self._become(change.after)

    def serve(self, config: ServeConfig) -> None:
        """Start the HTTP server, and return when it listens.

        Raises:
            ConfigError: The address cannot be bound, or an option is not supported.
            RuntimeError: There is a server already.
            EngineClosed: The engine is closed.
        """
        with self._changing:
            self._check_open()
            if self._frontend is not None:
                raise RuntimeError(f"the HTTP server runs already, at {self._frontend.url}; call shutdown() first")
            self._frontend = HttpFrontend(self._loaded, config, self._note_lost_ranks)

    def _note_lost_ranks(self, error: RankError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def close(self) -> None:
        """Stop the server and the engine, and free all resources. Further calls wait for the first one."""
        with self._changing:
            if self._state is State.STOPPED:
                return
            try:
                if self._frontend is not None:
                    self._frontend.stop()
            finally:
                self._become(State.STOPPED)
                try:
                    self._loaded.close()
                finally:
                    if not self.ended.done():
                        self.ended.set_result(None)

    def _become(self, state: State) -> None:
        self._state = state
        if self._log is not None:
            self._log.write(state)

    def _check_open(self) -> None:
        if self._state is State.STOPPED:
            raise EngineClosed("the engine has been shut down; make a new one")

    # Counts

    def progress(self) -> StepCounts:
        """Return the counts since the last reset, or those at the end of a closed engine."""
        return self._loaded.counts()[1] - self._baseline

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache, and count from zero."""
        self._baseline = self._loaded.reset()
