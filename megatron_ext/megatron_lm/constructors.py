"""Context, inference wrapper, controller and engine under Megatron's names, for scripts that construct them by hand.

Megatron allocates memory with the context, before there is a model. Here the first three keep their arguments, and the
engine, which is constructed last, attaches to the model; from then on each stands for the engine's own part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import nn

from megatron_ext.api.engine import AttachedEngine
from megatron_ext.api.loading import Setting, attach_engine, read_settings
from megatron_ext.apis.inference_config import read_inference_config
from megatron_ext.apis.runtime import conversion_for
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import RequestedParams
from megatron_ext.mcore.inference_request import DynamicInferenceRequestRecord, RequestConversion
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.text.tokenizer import Tokenizer

# Keywords of 0.16.1's context that the model itself tells, and two that affect the memory of suspended engines only.
_KNOWN_BY_THE_MODEL = frozenset(
    {
        *("params_dtype", "num_layers", "kv_channels", "num_attention_heads", "cache_mla_latent", "kv_lora_rank"),
        *("qk_pos_emb_head_dim", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("mamba_inference_state_config", "persist_cuda_graphs", "offload_kv_cache"),
    }
)
_DEFAULT_SEED = 42  # of `TransformerConfig.inference_sampling_seed`, which 0.16.1's engine is given


@dataclass(kw_only=True)
class ContextArguments:
    """Keywords of 0.16.1's `DynamicInferenceContext` and `DynamicInferenceEngine` that are settings of an engine.

    Names match the fields of `InferenceConfig`, which has most of them since 0.17. A value of None stands for the
    default of this package.
    """

    block_size_tokens: int = 256
    buffer_size_gb: float | None = None
    paused_buffer_size_gb: float | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    max_sequence_length: int | None = None
    num_cuda_graphs: int | None = None
    cuda_graph_mixed_prefill_count: int | None = 16
    cuda_graph_max_tokens: int | None = None
    use_cuda_graphs_for_non_decode_steps: bool = True
    use_flashinfer_fused_rope: bool | None = False
    unified_memory_level: int = 0
    materialize_only_last_token_logits: bool = True
    metrics_writer: object = None
    request_metadata_types: object = None
    pg_collection: object = None
    enable_chunked_prefill: bool = True
    track_paused_request_events: bool = False
    logging_step_interval: int = 0


class Part:
    """Object that stands for a part of an engine constructed later, and passes on all attributes but its own."""

    _part: object = None

    def stand_for(self, part: object) -> None:
        """Have the attributes of `part` from now on."""
        self._part = part

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the part.

        Raises:
            AttributeError: The engine has not been constructed, or its part has no such attribute.
        """
        if self._part is None:
            raise AttributeError(f"{type(self).__name__} has {name!r} only after the engine has been constructed")
        return getattr(self._part, name)


class ScriptContext(Part):
    """`DynamicInferenceContext`: settings of an engine, and its context later.

    Args:
        model_config: `TransformerConfig`, which the model has, too; not used.
        inference_config: `InferenceConfig` of 0.17 and newer.
        keywords: Arguments of 0.16.1; see `ContextArguments`.

    Attributes:
        arguments: Settings as they were given.
        config: `InferenceConfig`; None with arguments of 0.16.1.

    Raises:
        ConfigError: A setting is not supported; the message names it.
        TypeError: A keyword is unknown.
    """

    def __init__(self, model_config: object = None, inference_config: object = None, **keywords: object) -> None:
        self.config = self.arguments = inference_config
        if inference_config is None:
            given = {name: value for name, value in keywords.items() if name not in _KNOWN_BY_THE_MODEL}
            self.arguments = ContextArguments(**given)  # type: ignore[arg-type]  # of any type, as scripts give them
        batching = read_settings(read_inference_config(self.arguments).settings).batching
        self._planned = {
            "block_size_tokens": batching.block_size,
            "max_requests": batching.effective_max_requests,
            "max_sequence_length": batching.max_sequence_length,
            "max_tokens": batching.max_tokens_on(platform.device().type),
        }

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the engine's context; before there is one, a limit as it was asked for."""
        if self._part is None and name in self._planned:
            return self._planned[name]
        return super().__getattr__(name)


class ScriptWrapper(Part):
    """`GPTInferenceWrapper`: a model and a context.

    Args:
        arguments: The context; with 0.16.1 after a configuration of the wrapper, which is not used.
        inference_wrapper_config: The same configuration, not used.
        inference_context: The context as a keyword.
        pg_collection: Process groups; ignored, since the engine uses Megatron's global ones.
    """

    def __init__(
        self,
        model: nn.Module,
        *arguments: object,
        inference_wrapper_config: object = None,
        inference_context: object = None,
        pg_collection: object = None,
    ) -> None:
        contexts = [one for one in (*arguments, inference_context) if isinstance(one, ScriptContext)]
        if len(contexts) != 1:
            raise ConfigError(f"GPTInferenceWrapper has {len(contexts)} dynamic inference contexts; give one")
        self.model = model
        self.inference_context = contexts[0]


class ScriptController(Part):
    """`TextGenerationController`: a wrapped model and a tokenizer.

    Args:
        tokenizer: Tokenizer of megatron-core or of this package.
        pp_group: Pipeline group; ignored, since the engine uses Megatron's global one.
    """

    def __init__(self, inference_wrapped_model: ScriptWrapper, tokenizer: Tokenizer, pp_group: object = None) -> None:
        self.inference_wrapped_model = inference_wrapped_model
        self.tokenizer = tokenizer


class ScriptEngine(Part):
    """`DynamicInferenceEngine`: an engine that is attached to the model, stepped by the script's own thread.

    It has the methods of `InferenceEngine`. Ended requests are Megatron's `DynamicInferenceRequestRecord`s.

    Args:
        enable_cuda_graph: Argument of 0.16.1; the context's number of CUDA graphs decides.
        random_seed: Seed of 0.16.1; requests without a seed get one derived from it.
        track_paused_request_events: Argument of 0.16.1; whether the events of a request include pauses.
        enable_chunked_prefill: Argument of 0.16.1.
        inference_logging_step_interval: Argument of 0.16.1; steps between two log lines.
        pg_collection: Argument of 0.16.1; must be the groups of Megatron's global state.

    Raises:
        ConfigError: As `attach_engine`.
    """

    settings: ClassVar[Mapping[str, Setting]] = {}  # of `attach_engine`, beside the context's settings
    attached: ClassVar[list[AttachedEngine]] = []  # that have not been closed

    def __init__(
        self,
        controller: ScriptController,
        context: ScriptContext,
        enable_cuda_graph: bool | None = None,
        random_seed: int | None = None,
        *,
        track_paused_request_events: bool = False,
        enable_chunked_prefill: bool = True,
        inference_logging_step_interval: int = 0,
        pg_collection: object = None,
    ) -> None:
        _check_alone()
        model, arguments = controller.inference_wrapped_model.model, context.arguments
        if isinstance(arguments, ContextArguments):
            arguments = dataclasses.replace(
                arguments,
                track_paused_request_events=track_paused_request_events,
                enable_chunked_prefill=enable_chunked_prefill,
                logging_step_interval=inference_logging_step_interval,
                pg_collection=arguments.pg_collection or pg_collection,
            )
        options = read_inference_config(arguments)
        if random_seed is None:
            random_seed = getattr(getattr(model, "config", None), "inference_sampling_seed", _DEFAULT_SEED)
        settings = {"seed": random_seed, **options.settings_for(model, is_script=True), **self.settings}
        attached = attach_engine(model, controller.tokenizer, **settings)
        assert isinstance(attached, AttachedEngine), "a rank that is alone is the first"
        self.attached.append(attached)
        engine = attached.inference_engine
        engine.present = partial(_presented, conversion_for(attached, has_pause_events=options.has_pause_events))
        found = engine.controller
        self.stand_for(engine)
        context.stand_for(engine.context)
        controller.stand_for(found)
        controller.inference_wrapped_model.stand_for(found.inference_wrapped_model)


def _check_alone() -> None:
    """Raise if there are several ranks: each one's script would step an engine, and only the first rank has it."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1:
        raise ConfigError(
            f"DynamicInferenceEngine is constructed on {ranks} ranks, and by hand it needs a world of one; use a "
            "script with MegatronLLM, such as offline_inference.py, or megatron-ext run"
        )


def _presented(
    conversion: RequestConversion, record: RequestRecord, asked: RequestedParams
) -> DynamicInferenceRequestRecord:
    """Return Megatron's record of a request that has ended, with one request, which `merge()` and the index 0 give."""
    given = asked.given if isinstance(asked.given, SamplingParams) else SamplingParams()
    request = conversion.convert(record, given, asked.resolved.num_tokens_to_generate)
    return DynamicInferenceRequestRecord(requests=[request], latency=record.latency)
