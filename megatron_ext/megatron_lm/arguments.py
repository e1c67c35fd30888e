"""Settings of an engine from the keywords that scripts give to constructors of 0.16.1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

# Keywords of 0.16.1's context that the model itself tells, and two that affect the memory of suspended engines only.
_KNOWN_BY_THE_MODEL = frozenset(
    {
        *("params_dtype", "num_layers", "kv_channels", "num_attention_heads", "cache_mla_latent", "kv_lora_rank"),
        *("qk_pos_emb_head_dim", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("mamba_inference_state_config", "persist_cuda_graphs", "offload_kv_cache"),
    }
)


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


def context_arguments(keywords: Mapping[str, object]) -> ContextArguments:
    """Return the settings among the keywords of 0.16.1's context.

    Raises:
        TypeError: A keyword is not one of 0.16.1.
    """
    given = {name: value for name, value in keywords.items() if name not in _KNOWN_BY_THE_MODEL}
    known = {field.name for field in dataclasses.fields(ContextArguments)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise TypeError(f"DynamicInferenceContext has no argument {unknown[0]!r}")
    return ContextArguments(**given)  # type: ignore[arg-type]  # of any type, as scripts may give them
