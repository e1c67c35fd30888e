"""Builder of a megatron-core model from a `ModelConfig`."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.config import RECURRENT_KINDS, ModelConfig, ParallelConfig
from megatron_ext.config.layers import is_attention
from megatron_ext.config.model_fields import MULTIPLIERS
from megatron_ext.config.source import LOCAL, TRANSFORMER_ENGINE
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform  # first: it puts the CPU stand-ins in place
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.mcore.layers.mlp import ScaledSilu, quick_gelu, squared_relu
from megatron_ext.mcore.layers.stack import HybridStack
from megatron_ext.mcore.layers.transformer_engine import with_transformer_engine
from megatron_ext.memory.host_limits import allocating
from megatron_ext.models.config_fields import OWN_SPECS, is_own_spec
from megatron_ext.models.size import check_model_fits, described
from megatron_ext.parallel.layout import Share, check_model, share_of
from megatron_ext.parallel.world import ranks_on_this_machine

from megatron.core import parallel_state  # isort: skip
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip

_RECURRENT_LAYERS = ("mamba_layer", "parallel_layer")  # names of their specs in our stacks
# Fields and properties of `ModelConfig` with the same names in megatron-core's configuration, or in ours over it.
_SAME_NAMES = (
    *(name for name in MULTIPLIERS if name != "mlp_gate_multiplier"),  # that one belongs to the activation
    *"""
    activation_func_clamp_value add_attention_output_bias add_mlp_bias add_qkv_bias attention_output_gate
    attention_window glu_linear_offset normalization qk_layernorm qk_layernorm_over_heads rotary_magnitude softmax_type
    yarn_mscale yarn_mscale_all_dim
    """.split(),
)
_SAME_NAMES_OF_EXPERTS = """
    moe_latent_size moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups moe_router_pre_softmax
    moe_router_score_function moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_gate
    moe_shared_expert_intermediate_size
    """.split()


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    seed: int = 1234,
    perform_initialization: bool = True,
    parallel: ParallelConfig | None = None,
    transformer_impl: str = LOCAL,
) -> HybridModel:
    """Build this rank's part of the model in eval mode, with random weights from `seed` (the same on every device).

    Starts torch.distributed as a world of one if it is not initialized. Random weights depend on the group sizes.

    Args:
        perform_initialization: False leaves the large matrices as allocated, for a loader that fills them all.
        parallel: Parallel sizes; None takes the sizes of Megatron's groups.
        transformer_impl: One of `TRANSFORMER_IMPLEMENTATIONS`, which provides linear layers and norms.

    Raises:
        ConfigError: No vocabulary size, a spec that cannot be found, parameters that exceed the memory, or a model that
            cannot be divided by the sizes.
    """
    if config.vocab_size is None:
        raise ConfigError("the vocabulary size is unknown; give --vocab-size or a tokenizer")
    spec = resolve_spec(config)
    if transformer_impl == TRANSFORMER_ENGINE:
        spec = with_transformer_engine(spec)
    if parallel is not None:
        check_model(parallel, config)
    platform.initialize(parallel)
    share = share_of(platform.group_sizes(parallel), config, parallel_state.get_pipeline_model_parallel_rank())
    _check_stages(share, spec)
    _check_prediction(config, spec)
    device = device or platform.device()
    _check_memory(config, dtype, share, torch.device(device))
    half = "--bf16 needs half of it" if dtype.itemsize > 2 else "take a smaller model"
    parameters = f"its parameters: {described(config, dtype, share)}"
    with allocating(parameters, lambda: half), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + share.stage.start)  # each stage has other random weights
        made = _made(config, spec, dtype, perform_initialization, share)
        model = _with_rotary_embedding(made, config).to(device).eval()
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    assert numbers == list(share.stage), (numbers, share.stage)
    if perform_initialization:
        model.copy_embeddings()
    return model


def build_without_parameters(config: ModelConfig, dtype: torch.dtype, parallel: ParallelConfig) -> HybridModel:
    """Build this rank's part of the model with parameters and buffers on torch's meta device; no random state changes.

    Megatron's groups must exist.
    """
    check_model(parallel, config)
    spec = resolve_spec(config)
    _check_prediction(config, spec)
    share = share_of(platform.group_sizes(parallel), config, parallel_state.get_pipeline_model_parallel_rank())
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = _made(config, spec, dtype, False, share)
    return _with_rotary_embedding(model, config)


def _is_ours(spec: ModuleSpec) -> bool:
    return isinstance(spec.module, type) and issubclass(spec.module, HybridStack)


def _check_prediction(config: ModelConfig, spec: ModuleSpec) -> None:
    """Raise if layers of multi-token prediction would be made of a user's specs."""
    if config.mtp_num_layers and not _is_ours(spec):
        raise ConfigError("--mtp-num-layers is not supported with --spec; leave one of them out")


def _check_stages(share: Share, spec: ModuleSpec) -> None:
    """Raise if a user's stack would need a layer layout: it splits layers only as megatron-core does."""
    if share.needs_layer_layout and not _is_ours(spec):
        counts = ", ".join(str(len(stage)) for stage in share.stages)
        raise ConfigError(
            f"--spec cannot be used with pipeline stages of {counts} layers; give "
            "--num-layers-in-first-pipeline-stage and --num-layers-in-last-pipeline-stage so that the other stages "
            "are equal"
        )


def _check_memory(config: ModelConfig, dtype: torch.dtype, share: Share, device: torch.device) -> None:
    """Check that weights fit the host, where they are made and whose memory all ranks share, and then the device."""
    host = torch.device("cpu")
    check_model_fits(config, dtype, platform.available_memory(host) // ranks_on_this_machine(), share)
    if device != host:
        check_model_fits(config, dtype, platform.available_memory(device), share)


def _made(
    config: ModelConfig, spec: ModuleSpec, dtype: torch.dtype, perform_initialization: bool, share: Share
) -> HybridModel:
    """Return this rank's part of the model, on torch's default device."""
    assert config.vocab_size is not None, "the caller has looked"
    return HybridModel(
        transformer_config(config, dtype, perform_initialization, share),
        spec,
        pre_process=share.is_first,
        post_process=share.is_last,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        hybrid_override_pattern=config.hybrid_override_pattern,
        prediction=(config.mtp_pattern, config.mtp_layer_count) if config.mtp_num_layers else None,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        position_embedding_type=config.position_embedding_type,
        rotary_base=config.rotary_base,
        rotary_percent=config.rotary_percent,
    )


def _with_rotary_embedding(model: HybridModel, config: ModelConfig) -> HybridModel:
    if config.use_rope_scaling or config.yarn_rotary_scaling_factor is not None:  # MambaModel does not pass these on
        model.rotary_pos_emb = rotary_embedding(config)
    return model


def transformer_config(
    config: ModelConfig, dtype: torch.dtype, perform_initialization: bool = True, share: Share | None = None
) -> LayerConfig:
    """Return megatron-core's configuration: fused CUDA kernels off, weights initialised on the host.

    Args:
        config: Configuration of the whole model.
        perform_initialization: See `build_model`.
        share: This rank's share of the model; None for one rank.
    """
    others: dict[str, Any] = {
        **{name: getattr(config, name) for name in _SAME_NAMES},
        **_heads(config, share),
        **({} if share is None else share.core_fields),
        **(config.recurrent.core_fields(config) if config.is_hybrid else {}),
        **(_moe_fields(config) if config.is_moe else {}),
    }
    return LayerConfig(
        num_layers=config.layer_count,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_size,
        kv_channels=config.head_channels,
        layernorm_zero_centered_gamma=config.apply_layernorm_1p,
        layernorm_epsilon=config.norm_epsilon,
        add_bias_linear=not config.disable_bias_linear,
        gated_linear_unit=config.is_gated,
        activation_func=_activation(config),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        is_hybrid_model=config.is_hybrid,
        perform_initialization=perform_initialization,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        yarn_rotary_scaling_factor=config.yarn_rotary_scaling_factor or 1.0,
        **others,
    )


def _heads(config: ModelConfig, share: Share | None) -> dict[str, int]:
    """Return the head counts; upstream requires counts that ranks can share even if no layer has attention."""
    if share is not None and not any(map(is_attention, config.hybrid_override_pattern)):
        ranks = share.parallel.tensor_model_parallel_size
        return {"num_attention_heads": ranks, "num_query_groups": ranks} if ranks > 1 else _heads(config, None)
    return {"num_attention_heads": config.num_attention_heads, "num_query_groups": config.query_groups}


def _moe_fields(config: ModelConfig) -> dict[str, object]:
    """Return the MoE fields. Routing is always in fp32: a rounding error there selects another expert."""
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.expert_ffn_size,
        **{name: getattr(config, name) for name in _SAME_NAMES_OF_EXPERTS},
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",  # the only dispatcher that needs no CUDA streams
    }


def _activation(config: ModelConfig) -> object:
    if config.quick_geglu:
        return quick_gelu
    if config.swiglu:
        return F.silu if config.mlp_gate_multiplier == 1 else ScaledSilu(config.mlp_gate_multiplier)
    return squared_relu if config.squared_relu else F.gelu


def resolve_spec(config: ModelConfig) -> ModuleSpec:
    """Return the stack spec that `--spec MODULE NAME` names; our specs also get their mixers' parameters.

    Raises:
        ConfigError: No such module or name, or one of ours that is for another kind of recurrent layers.
    """
    module_name, name = config.spec or (OWN_SPECS, config.recurrent.stack_spec)
    try:
        spec = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--spec {module_name} {name} cannot be found: {error}") from error
    owner = next((kind.name for kind in RECURRENT_KINDS.values() if kind.stack_spec == name), None)
    if owner is None or not is_own_spec((module_name, name)):
        return spec
    if owner != config.recurrent_layer:
        raise ConfigError(
            f"--spec {module_name} {name} is for --recurrent-layer {owner}, and --recurrent-layer is "
            f"{config.recurrent_layer}; give --recurrent-layer {owner}, which needs no --spec"
        )
    params = {"chunk_size": config.scan_chunk_size, **config.recurrent.mixer_params(config)}
    layers = {name: _with_mixer_params(getattr(spec.submodules, name), params) for name in _RECURRENT_LAYERS}
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **layers))


def _with_mixer_params(layer: ModuleSpec, params: Mapping[str, object]) -> ModuleSpec:
    mixer = dataclasses.replace(layer.submodules.mixer, params=dict(params))
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mixer=mixer))


def rotary_embedding(config: ModelConfig) -> RotaryEmbedding:
    """Return megatron-core's embedding, with wavelengths scaled as configured."""
    embedding = RotaryEmbedding(
        kv_channels=config.head_channels,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        rope_scaling=config.use_rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    if config.yarn_rotary_scaling_factor is not None:
        embedding.inv_freq = stretched(embedding.inv_freq, config, config.yarn_rotary_scaling_factor)
    return embedding


def stretched(frequencies: Tensor, config: ModelConfig, factor: float) -> Tensor:
    """Return frequencies [n/2] scaled by YaRN (arXiv 2309.00071, section 3.2).

    A pair of channels that turns at least `yarn_beta_fast` times within the original length keeps its frequency; that
    of a pair that turns at most `yarn_beta_slow` times is divided by `factor`; between them both are blended.
    """
    pairs = len(frequencies)
    fast, slow = (_pair(config, pairs, turns) for turns in (config.yarn_beta_fast, config.yarn_beta_slow))
    if config.yarn_correction_range_round_to_int:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, 2 * pairs - 1)
    length = last - first or 0.001
    share = ((torch.arange(pairs, dtype=torch.float32) - first) / length).clamp(0, 1)  # weight of the divided frequency
    return frequencies / factor * share + frequencies * (1 - share)


def _pair(config: ModelConfig, pairs: int, turns: float) -> float:
    """Return the pair of channels with `turns` turns in the original length; frequencies are base ** (-i / pairs)."""
    wavelength = config.yarn_original_max_position_embeddings / turns
    return pairs * math.log(wavelength / (2 * math.pi)) / math.log(config.rotary_base)
