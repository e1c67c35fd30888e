"""Configuration of a model of Megatron in memory, translated by way of the arguments that Megatron would save."""

from __future__ import annotations

import dataclasses
import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.config.layers import YARN
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.mcore import platform  # noqa: F401  # first: it puts the CPU stand-ins in place
from megatron_ext.models.attach.modules import is_gpt
from megatron_ext.models.build import rotary_embedding
from megatron_ext.models.megatron.training_args import ARGUMENTS, config_from_args

from megatron.core import activations  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip

_OTHER_NAMES = {"layernorm_zero_centered_gamma": "apply_layernorm_1p", "num_moe_experts": "num_experts"}
# Fields of `TransformerConfig` that Megatron saves under the same names.
_SAME_NAMES = ARGUMENTS & {one.name for one in dataclasses.fields(TransformerConfig)} - _OTHER_NAMES.keys()
_TRANSLATED = frozenset((*_SAME_NAMES, *_OTHER_NAMES, "activation_func", "gated_linear_unit", "softmax_scale"))
# Fields that do not change what an evaluated model computes, apart from rounding: initialization, losses, dropout,
# memory, communication, layouts of ranks, fused kernels, upstream's own inference; and the sub-settings of features
# that must be off (fp8, fp4).
_WITHOUT_EFFECT = re.compile(
    r"""
    (init_method|embedding_init_method|output_layer_init_method|perform_initialization|use_cpu_initialization).*
    |init_model_with_meta_device
    |(recompute|tp_comm|cuda_graph|cross_entropy|overlap|fine_grained|batch_p2p|fp8|fp4|inference|qk_clip|dsa)_.+
    |(moe_deepep|moe_hybridep|moe_flex|moe_ncclep|moe_paged_stash|moe_permute|mtp|offload|activation_offload)_.+
    |(hidden|attention)_dropout|calculate_per_token_loss|log_max_attention_logit|config_logger_dir|timers
    |((moe_|mtp_)?grad_scale|no_sync|grad_sync|param_sync|finalize_model_grads)_func|barrier_with_L1_time
    |experimental_attention_variant_loss_scale_func|qk_clip|cpu_offloading_.+|tp_only_amax_red|moe_paged_stash
    |params_dtype|pipeline_dtype|bf16|fp16|autocast_dtype|attention_softmax_in_fp32|attention_backend
    |flash_attention_version|flash_decode|disable_bf16_reduced_precision_matmul|deterministic_mode
    |batch_invariant_mode|(bias_activation|masked_softmax|bias_dropout|apply_rope|gradient_accumulation)_fusion
    |persist_layer_norm|memory_efficient_layer_norm|use_fused_weighted_squared_relu
    |fused_single_qkv_rope|distribute_saved_activations|clone_scatter_output_in_embedding
    |disable_parameter_transpose_cache|enable_cuda_graph|external_cuda_graph|use_te_rng_tracker
    |symmetric_ar_type|nccl_all_reduce_for_prefill|use_inference_optimized_layers|transformer_impl
    |use_mamba_mem_eff_path|mlp_chunks_for_(prefill|training)|min_offloaded_tensor_size|hetereogenous_dist_checkpoint
    |tensor_model_parallel_size|sequence_parallel|pipeline_model_parallel_(size|comm_backend)
    |virtual_pipeline_model_parallel_size|expert_(model|tensor)_parallel_size|moe_extended_tp
    |num_layers_in_(first|last)_pipeline_stage|variable_seq_lengths|deallocate_pipeline_outputs
    |defer_embedding_wgrad_compute|wgrad_deferral_limit|delay_wgrad_compute|ep_overlap_early_attn_memory_release
    |microbatch_group_size_per_vp_stage|num_microbatches_with_partial_activation_checkpoints|use_ring_exchange_p2p
    |async_tensor_model_parallel_allreduce|high_priority_a2a_comm_stream|cp_comm_type|is_hybrid_model
    |delay_offload_until_cuda_graph|delta_offload_bytes_across_pp_ranks
    |moe_(grouped_gemm|use_legacy_grouped_gemm|router_dtype|router_fusion|router_bias_update_rate|layer_recompute)
    |moe_(aux_loss_coeff|z_loss_coeff|input_jitter_eps|per_layer_logging|token_dispatcher_type|enable_deepep)
    |moe_(shared_expert_overlap|enable_routing_replay|pad_expert_input_to_capacity|token_drop_policy|token_dropping)
    |moe_router_padding_for_(quantization|fp8)|moe_pad_experts_for_cuda_graph_inference
    """,
    re.VERBOSE,
)
_YARN_FIELDS = re.compile(r"yarn_.+")  # of newer versions' configurations


def config_of(model: nn.Module) -> ModelConfig:
    """Return the configuration of an unwrapped model, equal on every rank.

    Raises:
        ConfigError: A field has a value that this package cannot compute; the message names it.
    """
    transformer_config: TransformerConfig = model.config
    _check_fields(transformer_config)
    try:
        config = config_from_args(_arguments(model), "the model's configuration", is_gpt=is_gpt(model))
    except CheckpointError as error:  # of the reader of checkpoints
        raise ConfigError(str(error)) from None
    scale = transformer_config.softmax_scale
    return config if scale is None else dataclasses.replace(config, softmax_scale=float(scale))


def rotary_frequencies(model: nn.Module, config: ModelConfig) -> Tensor | None:
    """Return the frequencies by which a model rotates queries and keys; None without rotation, and for YaRN.

    Raises:
        ConfigError: The frequencies do not follow from the model's translated configuration.
    """
    embedding = getattr(model, "rotary_pos_emb", None)
    if embedding is None or model.position_embedding_type == YARN:
        return None
    found, expected = embedding.inv_freq.detach(), rotary_embedding(config).inv_freq
    # Equal up to the rounding of the device that computed them.
    if found.shape != expected.shape or not ((found.cpu() - expected).abs() <= 1e-5 * expected.abs()).all():
        raise ConfigError(
            "the frequencies in the model's rotary_pos_emb.inv_freq do not follow from rotary_base, rotary_percent and "
            "rope_scaling; such a model cannot be attached"
        )
    return found


def _check_fields(config: TransformerConfig) -> None:
    """Check that every field which is neither translated nor without effect has its default."""
    plain = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    for field in dataclasses.fields(TransformerConfig):
        name = field.name
        if name in _TRANSLATED or _WITHOUT_EFFECT.fullmatch(name) or _YARN_FIELDS.fullmatch(name):
            continue
        value, default = getattr(config, name), getattr(plain, name)
        if name.startswith("_") or value == default or value == field.default:
            continue
        raise ConfigError(
            f"the model's configuration has {name} = {value!r}, which is not supported; supported is {default!r}"
        )
    if config.bias_activation_fusion and config.activation_func is F.gelu:
        raise ConfigError(
            "the model's configuration has bias_activation_fusion = True with gelu, which Megatron replaces by its "
            "approximation with tanh then; supported is False"
        )


def _arguments(model: nn.Module) -> Namespace:
    """Return the arguments that Megatron would save with a model."""
    config = model.config
    values: dict[str, Any] = {name: getattr(config, name, None) for name in _SAME_NAMES}
    values |= {argument: getattr(config, name) for name, argument in _OTHER_NAMES.items()}
    values |= _activation(config)
    values |= {name: getattr(config, name) for name in vars(config) if _YARN_FIELDS.fullmatch(name)}
    values |= {
        "group_query_attention": True,
        "max_position_embeddings": model.max_sequence_length,
        "padded_vocab_size": model.vocab_size,
        "position_embedding_type": model.position_embedding_type,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        **dict(_rotary(model)),
    }
    if not is_gpt(model):
        values |= {
            "hybrid_override_pattern": _pattern(model),
            "hybrid_attention_ratio": getattr(model, "hybrid_attention_ratio", 0.0),
            "hybrid_mlp_ratio": getattr(model, "hybrid_mlp_ratio", 0.0),
        }
    return Namespace(**values)


def _pattern(model: nn.Module) -> str | None:
    """Return a hybrid's pattern without layers of multi-token prediction; None if ratios define it."""
    pattern = getattr(model, "hybrid_layer_pattern", None) or getattr(model, "hybrid_override_pattern", None)
    return None if pattern is None else pattern.split("/")[0]


def _activation(config: TransformerConfig) -> Mapping[str, bool]:
    function, is_gated = config.activation_func, config.gated_linear_unit
    if is_gated and function is F.silu:
        return {"swiglu": True}
    if is_gated and function is activations.quick_gelu:
        return {"quick_geglu": True}
    if not is_gated and function is activations.squared_relu:
        return {"squared_relu": True}
    if not is_gated and function is F.gelu:
        return {}
    raise ConfigError(
        f"the model's configuration has activation_func = {getattr(function, '__name__', function)} with "
        f"gated_linear_unit = {is_gated}, which is not supported; supported are gelu and squared_relu, and silu and "
        "quick_gelu with a gate"
    )


def _rotary(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the arguments of a rotary embedding; arguments that the model does not keep follow from its frequencies."""
    embedding, config = getattr(model, "rotary_pos_emb", None), cast("TransformerConfig", model.config)
    if embedding is None:
        return
    yield "rotary_interleaved", bool(getattr(embedding, "rotary_interleaved", False))
    yield "rotary_seq_len_interpolation_factor", embedding.seq_len_interpolation_factor
    if model.position_embedding_type == YARN:
        yield "rotary_base", model.rotary_base
        yield "rotary_percent", getattr(model, "rotary_percent", 1.0)
        return
    frequencies = embedding.inv_freq.detach().double().cpu()
    pairs = len(frequencies)
    yield "rotary_percent", getattr(model, "rotary_percent", 2 * pairs / config.kv_channels)
    base = getattr(model, "rotary_base", None)
    if base is None:
        base = 10000 if pairs == 1 else _rounded(float(frequencies[-1]) ** (-pairs / (pairs - 1)))
    yield "rotary_base", base
    if getattr(model, "rotary_scaling", False):
        yield "use_rope_scaling", True
        yield "rope_scaling_factor", _rounded(base ** (-(pairs - 1) / pairs) / float(frequencies[-1]))


def _rounded(number: float) -> float:
    """Return a number that fp32 has rounded, to six digits."""
    return round(number, 5 - math.floor(math.log10(abs(number))))
