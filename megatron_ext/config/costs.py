"""Compute and memory costs of cached tokens, for the simulation.

The formulas count multiplications and additions of a forward (two for each parameter that a token uses), as Marconi
(MLSys 2025) does for whole models; here nothing is subtracted, and the recurrence is counted with its actual width.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.layers import is_attention, is_mlp, is_recurrent
from megatron_ext.config.model import ModelConfig

_STATE_OPERATIONS = 6  # for each state element and token: decay, update, read; a product and a sum each


@dataclass(frozen=True)
class EntryCosts:
    """Costs of cached tokens; equal on every rank.

    Attributes:
        block_size: Tokens of a block.
        token_flops: Operations for one token at any position.
        position_flops: Operations for one token and each token before it.
        block_bytes: Bytes of one block, on all ranks together.
        state_bytes: Bytes of one snapshot, on all ranks together; 0 without recurrent layers.
    """

    block_size: int = 1
    token_flops: float = 1.0
    position_flops: float = 0.0
    block_bytes: int = 1
    state_bytes: int = 1

    def flops(self, start: int, end: int) -> float:
        """Return the operations to compute the tokens [start, end)."""
        return (end - start) * (self.token_flops + self.position_flops * (start + end - 1) / 2)


NEUTRAL_COSTS = EntryCosts()  # equal cost of all tokens and of all bytes


def entry_costs(config: ModelConfig, block_size: int, block_bytes: int, state_bytes: int) -> EntryCosts:
    """Return the costs of a model with blocks of `block_size` tokens; `state_bytes` is 0 without recurrent layers."""
    pattern = config.hybrid_override_pattern
    per_key = 4.0 * config.num_attention_heads * config.head_channels  # a score and a weighted sum
    growing = sum(is_attention(letter) and letter != "W" for letter in pattern)
    windows = per_key * pattern.count("W") * (config.attention_window or 0)
    return EntryCosts(
        block_size=block_size,
        token_flops=sum(_layer_flops(config, letter) for letter in pattern) + windows,
        position_flops=per_key * growing,
        block_bytes=block_bytes,
        state_bytes=state_bytes,
    )


def _layer_flops(config: ModelConfig, letter: str) -> float:
    """Return the operations for one token in one layer, without the products with keys and values."""
    flops = 0.0
    if is_recurrent(letter):
        flops += 2.0 * config.recurrent.parameter_count(config) + _STATE_OPERATIONS * config.recurrent.state_size(
            config
        )
    if is_attention(letter):
        flops += 2.0 * config.hidden_size * config.head_channels * projected_heads(config)
    if is_mlp(letter):
        flops += 2.0 * mlp_parameters(config, config.hidden_size, config.ffn_size)
    return flops + (2.0 * _expert_parameters(config) if letter == "E" else 0.0)


def projected_heads(config: ModelConfig) -> int:
    """Return the number of projected heads: query, key, value, output, and the output's gate."""
    return (2 + config.attention_output_gate) * config.num_attention_heads + 2 * config.query_groups


def mlp_parameters(config: ModelConfig, width: int, inner: int) -> int:
    """Return the parameters of an MLP or an expert between two widths."""
    return (3 if config.is_gated else 2) * width * inner


def _expert_parameters(config: ModelConfig) -> int:
    """Count the parameters that one token uses: router, routed and shared experts, latent projections."""
    assert config.num_experts is not None, "a pattern with E has been checked"
    width = config.moe_latent_size or config.hidden_size
    routed = config.moe_router_topk * mlp_parameters(config, width, config.expert_ffn_size)
    shared = mlp_parameters(config, config.hidden_size, config.moe_shared_expert_intermediate_size or 0)
    latent = 2 * config.hidden_size * width if config.moe_latent_size else 0
    return config.num_experts * config.hidden_size + routed + shared + latent
