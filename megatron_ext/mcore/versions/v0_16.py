"""megatron-core 0.16.1: settings are arguments of the engine and of the inference wrapper."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator as BlockAllocator
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ext.text.tokenizer import tokenize_prompt

Model, Stack, StackSubmodules = MambaModel, MambaStack, MambaStackSubmodules


class Context(DynamicInferenceContext):
    """`DynamicInferenceContext` without its initializer."""

    def __init__(self, **_: object) -> None:
        BaseInferenceContext.__init__(self, materialize_only_last_token_logits=True)


class Controller(TextGenerationController):
    """`TextGenerationController` with the text interface of this version."""

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of a text; see `text.tokenizer.tokenize_prompt`."""
        return tokenize_prompt(self.tokenizer, prompt, add_bos=add_BOS)


class Engine(DynamicInferenceEngine):
    """`DynamicInferenceEngine` with the state of this version's run loops."""

    step_data = 4  # values that `async_forward` returns and `async_bookkeep` takes

    def __init__(self, controller: Controller, context: Context, random_seed: int, logging_step_interval: int) -> None:
        super().__init__(
            controller,
            context,
            random_seed=random_seed,
            enable_chunked_prefill=context.plan.limits.chunked_prefill,
            inference_logging_step_interval=logging_step_interval,
        )

    def reset_loop_state(self) -> None:
        """Reset the attributes that upstream's run loops and coordinator code use."""
        self._cond = asyncio.Condition()
        self.running = asyncio.Event()
        self.paused = asyncio.Event()
        self.stopped = asyncio.Event()
        self.received_pause = False
        self.received_stop = False
        self.suspend_signal = False
        self.use_coordinator = False


def wrap(model: MambaModel, context: Context, padded_vocab_size: int) -> GPTInferenceWrapper:
    """Return the inference wrapper of a model in eval mode."""
    config = InferenceWrapperConfig(
        hidden_size=model.config.hidden_size,
        params_dtype=model.config.params_dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=padded_vocab_size,
        inference_max_requests=context.max_requests,
        inference_max_seq_length=context.max_sequence_length,
    )
    return GPTInferenceWrapper(model, config, context)


def pattern_arguments(pattern: str, config: TransformerConfig, *, is_validated: bool) -> Mapping[str, object]:
    """Return the arguments of `Model` that give its layers."""
    return {"hybrid_override_pattern": pattern}


def builder(module: type, submodules: object, **arguments: object) -> ModuleSpec:
    """Return what upstream's MoE layers build a part from."""
    return ModuleSpec(module=module, submodules=submodules, params=arguments)


def inference_mode() -> contextlib.AbstractContextManager[None]:
    """Return a context without effect: a forward with an inference context is inference."""
    return contextlib.nullcontext()
