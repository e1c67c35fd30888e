"""How large a model's parameters are, known before any of them is allocated."""

from __future__ import annotations

import torch

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError

GIB = 1024**3


def matrix_parameter_count(config: ModelConfig) -> int:
    """Parameters in the matrices and convolutions of the package's own layers: all but norms and biases.

    Args:
        config: With a vocabulary size.
    """
    layers = {
        "M": _RECURRENT[config.recurrent_layer](config),
        "*": _attention(config),
        "-": _mlp(config, config.hidden_size, config.ffn_size),
        "E": _experts(config) if config.is_moe else 0,
    }
    tables = 1 + config.untie_embeddings_and_output_weights
    positions = config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else 0
    embeddings = (tables * config.vocab_size + positions) * config.hidden_size
    return embeddings + sum(layers[symbol] for symbol in config.hybrid_override_pattern)


def _attention(config: ModelConfig) -> int:
    """Query, key, value and output; the output's gate."""
    heads = (2 + config.attention_output_gate) * config.num_attention_heads + 2 * config.query_groups
    return config.hidden_size * config.head_channels * heads


def _mamba(config: ModelConfig) -> int:
    """in_proj to z, x, B, C and dt; the convolution of x, B and C; out_proj."""
    inner = config.mamba_heads * config.mamba_head_dim
    projected = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + config.mamba_heads
    convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    return config.hidden_size * (projected + inner) + convolved * config.mamba_conv_kernel


def _gated_delta_net(config: ModelConfig) -> int:
    """in_proj to query, key, value, gate, beta and alpha; the convolution of the first three; out_proj."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    projected = 2 * keys + 3 * values + 2 * config.linear_num_value_heads
    return config.hidden_size * projected + (2 * keys + values) * config.linear_conv_kernel_dim


def _mamba1(config: ModelConfig) -> int:
    """in_proj to x and z; the convolution of x; x_proj to dt, B and C; dt_proj; A_log; out_proj."""
    inner, states, rank = config.mamba_channels, config.mamba_state_dim, config.dt_rank
    return inner * (3 * config.hidden_size + 2 * rank + 3 * states + config.mamba_conv_kernel)


_RECURRENT = {"mamba2": _mamba, "mamba1": _mamba1, "gated_delta_net": _gated_delta_net}


def _mlp(config: ModelConfig, width: int, inner: int) -> int:
    return (3 if config.swiglu else 2) * width * inner


def _experts(config: ModelConfig) -> int:
    """Router, routed experts, shared experts with their gate, and the projections to and from a latent width."""
    width = config.moe_latent_size or config.hidden_size
    shared = config.moe_shared_expert_intermediate_size or 0
    gate = config.moe_shared_expert_gate * config.hidden_size
    latent = 2 * config.hidden_size * width if config.moe_latent_size else 0
    routed = config.num_experts * (config.hidden_size + _mlp(config, width, config.expert_ffn_size))
    return routed + _mlp(config, config.hidden_size, shared) + gate + latent


def check_model_fits(config: ModelConfig, dtype: torch.dtype, available_bytes: int) -> None:
    """See that the parameters fit the memory there is, before they are allocated.

    Raises:
        ConfigError: They do not.
    """
    needed = matrix_parameter_count(config) * dtype.itemsize
    if needed > available_bytes:
        raise ConfigError(
            f"a model of hidden size {config.hidden_size}, {config.layer_count} layers and {config.vocab_size} "
            f"vocabulary entries needs {needed / GIB:.1f} GB for its parameters in {_name(dtype)}, and "
            f"{available_bytes / GIB:.1f} GB of memory are free; give a smaller --hidden-size, fewer layers or a "
            "smaller --vocab-size"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
