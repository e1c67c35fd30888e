"""Views of a running engine under the names of Megatron's engine, context and controller.

Reading is safe in any thread; requests and the lifecycle go through `MegatronLLM`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Protocol

from megatron_ext.api.engine import LoadedEngine
from megatron_ext.engine.step_counts import StepCounts
from megatron_ext.text.prompt_tokenization import tokenize_prompt
from megatron_ext.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine's pools and steps, equal on all ranks.

    Attributes:
        max_requests: Maximum number of running requests.
        max_tokens: Maximum number of tokens of a step.
        max_sequence_length: Maximum number of tokens of a request, prompt included.
        block_size_tokens: Tokens of a KV block.
        blocks: KV blocks.
        enable_prefix_caching: Whether prefix caching is on.
        is_hybrid_model: Whether the model has recurrent layers.
        captured: Sizes of captured steps.
    """

    max_requests: int
    max_tokens: int
    max_sequence_length: int
    block_size_tokens: int
    blocks: int
    enable_prefix_caching: bool
    is_hybrid_model: bool
    captured: int

    @classmethod
    def of(cls, loaded: LoadedEngine) -> Limits:
        """Return the limits of an engine."""
        engine = loaded.inference_engine
        context = engine.context
        return cls(
            max_requests=context.max_requests,
            max_tokens=context.max_tokens,
            max_sequence_length=context.max_sequence_length,
            block_size_tokens=context.block_size_tokens,
            blocks=engine.geometry.blocks,
            enable_prefix_caching=engine.core.is_caching,
            is_hybrid_model=bool(context.is_hybrid_model),
            captured=len(context.cuda_graph_batch_dimensions_list),
        )

    def facts(self) -> dict[str, int]:
        """Return the values by name, for another rank."""
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: Mapping[str, int]) -> Limits:
        """Return the limits of another rank."""
        return cls(**{one.name: facts[one.name] for one in fields(cls)})  # type: ignore[arg-type]  # bool is int


@dataclass(frozen=True)
class Progress:
    """Counts of an engine since its start.

    Attributes:
        steps: Steps by how they were computed.
        prefill_tokens: Prefill tokens computed, recomputed ones included.
    """

    steps: StepCounts = field(default_factory=StepCounts)
    prefill_tokens: int = 0

    def __sub__(self, earlier: Progress) -> Progress:
        return Progress(self.steps - earlier.steps, self.prefill_tokens - earlier.prefill_tokens)


class Counted(Protocol):
    """Engine with counts, which can be reset."""

    def progress(self) -> Progress:
        """Return the counts since the last reset."""

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache, and count from zero."""


@dataclass(frozen=True)
class BlockCounts:
    """Numbers of KV blocks: in total, and for running requests."""

    total_count: int
    active_count: int


class ContextView:
    """Limits and counts, under the names of `DynamicInferenceContext`.

    Args:
        limits: Limits of the engine.
        counted: The engine's counts; those of a rank without requests stay zero.
    """

    unified_memory_level = 0

    def __init__(self, limits: Limits, counted: Counted) -> None:
        self._counted = counted
        self.max_requests, self.max_tokens = limits.max_requests, limits.max_tokens
        self.max_sequence_length = limits.max_sequence_length
        self.block_size_tokens = limits.block_size_tokens
        self.enable_prefix_caching = limits.enable_prefix_caching
        self.is_hybrid_model = limits.is_hybrid_model
        self.kv_block_allocator = BlockCounts(limits.blocks, limits.blocks)
        self.cuda_graph_batch_dimensions_list: Sequence[object] = (None,) * limits.captured

    @property
    def step_count(self) -> int:
        """Steps since the last reset."""
        return self._counted.progress().steps.steps

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prefill tokens computed since the last reset."""
        return self._counted.progress().prefill_tokens

    @property
    def async_sched_step_count(self) -> int:
        """Steps launched before the tokens of the previous step were known."""
        return self._counted.progress().steps.asynchronous

    @property
    def async_sched_compaction_step_count(self) -> int:
        """Steps launched so of which rows were discarded."""
        return self._counted.progress().steps.discarding


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

    Attributes:
        capture_stats: Seconds (`time`) of the capture of CUDA graphs; None without graphs.
    """

    def __init__(
        self, context: ContextView, controller: ControllerView, counted: Counted, capture_stats: object = None
    ) -> None:
        self.context = context
        self.controller = controller
        self.capture_stats = capture_stats
        self._counted = counted

    @property
    def step_count(self) -> int:
        """Steps since the last reset."""
        return self.context.step_count

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache, and count from zero."""
        self._counted.reset()
