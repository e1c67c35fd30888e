"""A megatron-core model from a `ModelConfig`."""

from __future__ import annotations

import dataclasses
import importlib

import torch
import torch.nn.functional as F

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform  # first: it puts the CPU stand-ins in place
from megatron_ext.models.size import check_model_fits
from megatron_ext.models.stack_specs import OWN_SPECS, STACK_SPECS, is_own_spec

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # isort: skip
from megatron.core.models.mamba import MambaModel  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    seed: int = 1234,
    perform_initialization: bool = True,
) -> MambaModel:
    """Build the model in eval mode, with random weights from `seed` (the same on every device).

    Starts torch.distributed as a world of one if nobody did.

    Args:
        perform_initialization: False leaves the large matrices as allocated, for a loader that fills them all.

    Raises:
        ConfigError: No vocabulary size, a spec that cannot be found, or parameters that do not fit the memory there is.
    """
    if config.vocab_size is None:
        raise ConfigError("the vocabulary size is unknown; give --vocab-size or a tokenizer")
    spec = resolve_spec(config)
    device = device or platform.device()
    for place in {torch.device("cpu"), torch.device(device)}:  # weights are made on the host, then moved
        check_model_fits(config, dtype, platform.available_memory(place))
    platform.initialize()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MambaModel(
            transformer_config(config, dtype, perform_initialization),
            spec,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            hybrid_override_pattern=config.hybrid_override_pattern,
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_base=config.rotary_base,
            rotary_percent=config.rotary_percent,
        )
    if config.use_rope_scaling:  # MambaModel does not pass these on
        model.rotary_pos_emb = RotaryEmbedding(
            kv_channels=config.head_channels,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            rope_scaling=True,
            rope_scaling_factor=config.rope_scaling_factor,
            use_cpu_initialization=True,
        )
    return model.to(device).eval()


def transformer_config(
    config: ModelConfig, dtype: torch.dtype, perform_initialization: bool = True
) -> TransformerConfig:
    """megatron-core's configuration: fused CUDA kernels off, weights initialised on the host."""
    return TransformerConfig(
        num_layers=config.layer_count,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        kv_channels=config.head_channels,
        mamba_state_dim=config.mamba_state_dim,
        mamba_head_dim=config.mamba_head_dim,
        mamba_num_heads=config.mamba_heads if config.is_hybrid and config.recurrent_layer == "mamba2" else None,
        mamba_num_groups=config.mamba_num_groups,
        linear_key_head_dim=config.linear_key_head_dim,
        linear_value_head_dim=config.linear_value_head_dim,
        linear_num_key_heads=config.linear_num_key_heads,
        linear_num_value_heads=config.linear_num_value_heads,
        linear_conv_kernel_dim=config.linear_conv_kernel_dim,
        qk_layernorm=config.qk_layernorm,
        attention_output_gate=config.attention_output_gate,
        normalization=config.normalization,
        layernorm_zero_centered_gamma=config.apply_layernorm_1p,
        layernorm_epsilon=config.norm_epsilon,
        add_bias_linear=not config.disable_bias_linear,
        gated_linear_unit=config.swiglu,
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
        **(_moe_fields(config) if config.is_moe else {}),
    )


def _moe_fields(config: ModelConfig) -> dict[str, object]:
    """Routing is computed in fp32 whatever the parameters' type: a rounding error there is another expert."""
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.expert_ffn_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": config.moe_shared_expert_gate,
        "moe_latent_size": config.moe_latent_size,
        "moe_router_topk": config.moe_router_topk,
        "moe_router_score_function": config.moe_router_score_function,
        "moe_router_num_groups": config.moe_router_num_groups,
        "moe_router_group_topk": config.moe_router_group_topk,
        "moe_router_pre_softmax": config.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor,
        "moe_router_enable_expert_bias": config.moe_router_enable_expert_bias,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",  # the one that needs no CUDA streams
    }


def _activation(config: ModelConfig) -> object:
    if config.swiglu:
        return F.silu
    return squared_relu if config.squared_relu else F.gelu


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2; upstream's is under `torch.compile`, which costs seconds for every new shape and needs a compiler."""
    return F.relu(x).square()


def resolve_spec(config: ModelConfig) -> ModuleSpec:
    """The stack spec that `--spec MODULE NAME` names; ours get what their mixers need besides.

    Raises:
        ConfigError: No such module or name, or one of ours that is for another kind of recurrent layers.
    """
    module_name, name = config.spec or (OWN_SPECS, STACK_SPECS[config.recurrent_layer])
    try:
        spec = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--spec {module_name} {name} cannot be found: {error}") from error
    if not is_own_spec((module_name, name)):
        return spec
    kind = next(kind for kind, owned in STACK_SPECS.items() if owned == name)
    if kind != config.recurrent_layer:
        raise ConfigError(
            f"--spec {module_name} {name} is for --recurrent-layer {kind}, and --recurrent-layer is "
            f"{config.recurrent_layer}; give --recurrent-layer {kind}, which needs no --spec"
        )
    mixer = dataclasses.replace(spec.submodules.mamba_layer.submodules.mixer, params=_mixer_params(config))
    mamba_submodules = dataclasses.replace(spec.submodules.mamba_layer.submodules, mixer=mixer)
    mamba_layer = dataclasses.replace(spec.submodules.mamba_layer, submodules=mamba_submodules)
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, mamba_layer=mamba_layer))


def _mixer_params(config: ModelConfig) -> dict[str, object]:
    """What megatron-core's configuration has no place for."""
    params: dict[str, object] = {"chunk_size": config.scan_chunk_size}
    if config.recurrent_layer in ("mamba2", "mamba1"):
        params["d_conv"] = config.mamba_conv_kernel
    if config.recurrent_layer == "mamba1":
        params["d_inner"] = config.mamba_channels
        params["dt_rank"] = config.dt_rank
        params["inner_norm"] = config.mamba_inner_norm
        params["inner_norm_epsilon"] = config.inner_norm_epsilon
    return params
