"""Size of a model's parameters, computed before any of them is allocated."""

from __future__ import annotations

import math

import torch

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.config.costs import mlp_parameters, projected_heads
from megatron_ext.config.layers import is_attention, is_mlp, is_recurrent
from megatron_ext.config.model_fields import LEARNED_POSITIONS
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.layout import Share

GIB = 1024**3


def matrix_parameter_count(config: ModelConfig, share: Share | None = None) -> int:
    """Return the number of parameters in matrices and convolutions of our own layers: all but norms and biases.

    Args:
        config: Configuration with a vocabulary size.
        share: Share of one rank; None for the whole model.
    """
    if share is None:
        share = Share(ParallelConfig(), (range(config.layer_count),), 0)
    tensor = share.parallel.tensor_model_parallel_size
    recurrent = config.recurrent.parameter_count(config) // tensor
    attention = config.hidden_size * config.head_channels * projected_heads(config) // tensor
    mlp = mlp_parameters(config, config.hidden_size, config.ffn_size) // tensor
    experts = _experts(config, share.parallel) if config.is_moe else 0
    depths = config.mtp_layer_count if share.is_last else 0
    layers = sum(
        recurrent * is_recurrent(letter)
        + attention * is_attention(letter)
        + mlp * is_mlp(letter)
        + experts * (letter == "E")
        for letter in share.pattern(config) + config.mtp_pattern * depths
    )
    return _embeddings(config, share) + layers + depths * 2 * config.hidden_size**2 // tensor


def _embeddings(config: ModelConfig, share: Share) -> int:
    """Count vocabulary tables and position embeddings of the first and last stage, a shared table once.

    With layers of multi-token prediction the last stage has the embedding, too.
    """
    assert config.vocab_size is not None, "the tokenizer says it where the configuration does not"
    has_embedding = share.is_first or (share.is_last and config.mtp_layer_count > 0)
    is_untied = config.untie_embeddings_and_output_weights
    tables = has_embedding + share.is_last if is_untied else share.is_first or share.is_last
    positions = config.max_position_embeddings if config.position_embedding_type == LEARNED_POSITIONS else 0
    rows = math.ceil(config.vocab_size / share.parallel.tensor_model_parallel_size)  # the last ranks' rows are padded
    return (tables * rows + has_embedding * positions) * config.hidden_size


def _experts(config: ModelConfig, parallel: ParallelConfig) -> int:
    """Count the router, routed experts, shared experts with their gate, and the projections to and from a latent width.

    Experts are divided over expert-parallel ranks, and each over expert-tensor-parallel ranks; router, gate and
    projections are replicated on every rank.
    """
    assert config.num_experts is not None, "a pattern with E has been checked"
    width = config.moe_latent_size or config.hidden_size
    shared = config.moe_shared_expert_intermediate_size or 0
    gate = config.moe_shared_expert_gate * config.hidden_size
    latent = 2 * config.hidden_size * width if config.moe_latent_size else 0
    router = config.num_experts * config.hidden_size
    held = config.num_experts // parallel.expert_model_parallel_size
    routed = held * mlp_parameters(config, width, config.expert_ffn_size) // parallel.expert_tensor_size
    shared_experts = mlp_parameters(config, config.hidden_size, shared) // parallel.tensor_model_parallel_size
    return router + routed + shared_experts + gate + latent


def check_model_fits(config: ModelConfig, dtype: torch.dtype, available_bytes: int, share: Share | None = None) -> None:
    """Check that this rank's parameters fit the memory available to it, before they are allocated.

    Args:
        config: Configuration of the whole model.
        share: See `matrix_parameter_count`.
    """
    needed = matrix_parameter_count(config, share) * dtype.itemsize
    if needed > available_bytes:
        halved = dtype.itemsize > 2 and needed * 2 / dtype.itemsize <= available_bytes
        smaller = "a smaller --hidden-size, fewer layers or a smaller --vocab-size"
        advice = "give --bf16" if halved else f"{needed / GIB:.2f} GB must be free; or give {smaller}"
        free = f"{available_bytes / GIB:.2f} GB of memory are free for this process"
        raise ConfigError(f"{described(config, dtype, share)}, and {free}; {advice}")


def described(config: ModelConfig, dtype: torch.dtype, share: Share | None = None) -> str:
    """Describe a model by its sizes, and the memory that its parameters need, on this rank if there are several."""
    needed = matrix_parameter_count(config, share) * dtype.itemsize
    where = " on this rank" if share is not None and share.parallel.smallest_world > 1 else ""
    kind = str(dtype).removeprefix("torch.")
    return (
        f"a model of hidden size {config.hidden_size}, {config.layer_count} layers and {config.vocab_size} "
        f"vocabulary entries needs {needed / GIB:.2f} GB for its parameters in {kind}{where}"
    )
