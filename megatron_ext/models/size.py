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
        "M": config.recurrent.parameter_count(config),
        "*": _attention(config),
        "-": _mlp(config, config.hidden_size, config.ffn_size),
        "E": _experts(config) if config.is_moe else 0,
    }
    assert config.vocab_size is not None, "the tokenizer says it where the configuration does not"
    tables = 1 + config.untie_embeddings_and_output_weights
    positions = config.max_position_embeddings if config.position_embedding_type == "learned_absolute" else 0
    embeddings = (tables * config.vocab_size + positions) * config.hidden_size
    return embeddings + sum(layers[symbol] for symbol in config.hybrid_override_pattern)


def _attention(config: ModelConfig) -> int:
    """Query, key, value and output; the output's gate."""
    heads = (2 + config.attention_output_gate) * config.num_attention_heads + 2 * config.query_groups
    return config.hidden_size * config.head_channels * heads


def _mlp(config: ModelConfig, width: int, inner: int) -> int:
    return (3 if config.swiglu else 2) * width * inner


def _experts(config: ModelConfig) -> int:
    """Router, routed experts, shared experts with their gate, and the projections to and from a latent width."""
    assert config.num_experts is not None, "a pattern with E has been checked"
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
        halved = dtype.itemsize > 2 and needed * 2 / dtype.itemsize <= available_bytes
        smaller = "a smaller --hidden-size, fewer layers or a smaller --vocab-size"
        advice = "--bf16 would do" if halved else f"{needed / GIB:.2f} GB free would do, or {smaller}"
        free = f"{available_bytes / GIB:.2f} GB of memory are free for this process"
        raise ConfigError(f"{described(config, dtype)}, and {free}; {advice}")


def described(config: ModelConfig, dtype: torch.dtype) -> str:
    """A model by what makes it large, and the memory that its parameters need."""
    needed = matrix_parameter_count(config) * dtype.itemsize
    return (
        f"a model of hidden size {config.hidden_size}, {config.layer_count} layers and {config.vocab_size} "
        f"vocabulary entries needs {needed / GIB:.2f} GB for its parameters in {_name(dtype)}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
