"""Shared parts of the adapters to 0.17 and newer, whose inference context holds the settings of all classes."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Mapping

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, EngineState
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import TransformerConfig

from megatron_ext.text.tokenizer import Tokenizer, tokenize_prompt

__all__ = ["BlockAllocator", "Context", "Controller", "builder", "pattern_arguments", "wrap"]

BlockAllocator = KVBlockAllocator


class Context(DynamicInferenceContext):
    """`DynamicInferenceContext` without its initializer; upstream's classes read their settings from `config`."""

    num_speculative_tokens = 0  # drafts of multi-token prediction layers, which are not built

    def __init__(self, **settings: object) -> None:
        BaseInferenceContext.__init__(self, InferenceConfig(**settings))


class Controller(TextGenerationController):
    """`TextGenerationController` with the text interface of these versions."""

    @staticmethod
    def tokenize_prompt(tokenizer: Tokenizer, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of a text; see `text.tokenizer.tokenize_prompt`."""
        return tokenize_prompt(tokenizer, prompt, add_bos=add_BOS)


class Engine(DynamicInferenceEngine):
    """`DynamicInferenceEngine` with the state of these versions' run loops."""

    step_data = 3  # values that `async_forward` returns and `async_bookkeep` takes

    def __init__(self, controller: Controller, context: Context, random_seed: int, logging_step_interval: int) -> None:
        self.random_seed, self.inference_logging_step_interval = random_seed, logging_step_interval
        super().__init__(controller, context)

    @property
    def state(self) -> EngineState:
        """State that upstream's loops wait for: SUSPENDED while the pools are freed."""
        return EngineState.SUSPENDED if self.is_suspended else self._own_state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._own_state = state

    def reset_loop_state(self) -> None:
        """Reset the attributes that upstream's run loops and coordinator code use."""
        self._cond = asyncio.Condition()
        self._state_events = {state: asyncio.Event() for state in self._STATE_EVENTS}
        self.state = EngineState.RUNNING
        self._state_events[EngineState.RUNNING].set()
        self._pending_signals: deque[object] = deque()
        self.use_coordinator = False


def wrap(model: LanguageModule, context: Context, padded_vocab_size: int) -> GPTInferenceWrapper:
    """Return the inference wrapper of a model in eval mode."""
    return GPTInferenceWrapper(model, context)


def pattern_arguments(pattern: str, config: TransformerConfig, *, is_validated: bool) -> Mapping[str, object]:
    """Return the arguments of `Model` that give its layers.

    A model of these versions checks letters and stages before its stack sees them. A stack of ours knows more of both,
    and has the pattern itself: then the model gets one that passes any check.
    """
    stages, layout = config.pipeline_model_parallel_size, config.pipeline_model_parallel_layout
    has_sizes = (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage) != (None, None)
    if not is_validated:
        pattern = "-" * (stages if layout is not None else len(pattern))
    if has_sizes:
        return {"hybrid_layer_pattern": pattern}
    count = len(pattern) // stages
    return {"hybrid_layer_pattern": "|".join(pattern[first : first + count] for first in range(0, len(pattern), count))}


def builder(module: type, submodules: object, **arguments: object) -> Callable[..., object]:
    """Return what upstream's MoE layers build a part from."""
    return functools.partial(module, submodules=submodules, **arguments)
