"""Views of a running engine under the names of Megatron's engine, context and controller.

Reading is safe in any thread; requests and the lifecycle go through `MegatronLLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.engine.statistics import StepCounts
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.text.prompt_tokenization import tokenize_prompt
from megatron_ext.text.tokenizer import Tokenizer


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


class Counted(Protocol):
    """Engine with counts, which can be reset."""

    def progress(self) -> StepCounts:
        """Return the counts since the last reset."""

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache, and count from zero."""


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
        counted: The engine's counts; all stay zero on a rank without requests.
    """

    unified_memory_level = 0
    cuda_graph_batch_dimensions_list = ()

    def __init__(self, facts: Mapping[str, int], counted: Counted) -> None:
        self._counted = counted
        self.max_requests, self.max_tokens = facts["max_requests"], facts["max_tokens"]
        self.max_sequence_length = facts["max_sequence_length"]
        self.block_size_tokens = facts["block_size_tokens"]
        self.enable_prefix_caching = facts["enable_prefix_caching"]
        self.is_hybrid_model = facts["is_hybrid_model"]
        self.kv_block_allocator = BlockCounts(facts["blocks"], facts["blocks"], facts["blocks"] + 1)

    @property
    def step_count(self) -> int:
        """Steps since the last reset."""
        return self._counted.progress().steps

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prefill tokens computed since the last reset."""
        return self._counted.progress().prefill_tokens

    @property
    def async_sched_step_count(self) -> int:
        """Steps launched before the tokens of the previous step were known."""
        return self._counted.progress().asynchronous

    @property
    def async_sched_compaction_step_count(self) -> int:
        """Steps launched so of which rows were discarded."""
        return self._counted.progress().discarding


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
        counted: The engine's counts.
        capture_stats: Seconds (`time`) of the capture of CUDA graphs; None without graphs.
    """

    def __init__(
        self, facts: Mapping[str, int], tokenizer: Tokenizer, counted: Counted, capture_stats: object = None
    ) -> None:
        self.context, self.controller = ContextView(facts, counted), ControllerView(tokenizer)
        self.capture_stats = capture_stats
        self._counted = counted

    @property
    def step_count(self) -> int:
        """Steps since the last reset."""
        return self.context.step_count

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache, and count from zero."""
        self._counted.reset()
