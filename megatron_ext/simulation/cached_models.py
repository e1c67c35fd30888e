"""Models by name, described by their cache costs: costs of tokens, and sizes of blocks and states."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.config import ModelConfig
from megatron_ext.config.costs import EntryCosts, entry_costs

_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
ELEMENT_BYTES, STATE_ELEMENT_BYTES = 2, 4  # of keys, values and convolution states; of recurrent states


@dataclass(frozen=True)
class CachedModel:
    """Model in a simulation.

    Attributes:
        known: Costs at one block size.
        longest: Maximum number of tokens of a sequence.
    """

    known: EntryCosts
    longest: int

    def reaching(self, tokens: int) -> CachedModel:
        """Return the same model with another maximum number of tokens of a sequence."""
        return replace(self, longest=tokens)

    def costs(self, block_size: int) -> EntryCosts:
        """Return the costs with blocks of this many tokens."""
        bytes_of_block = self.known.block_bytes * block_size // self.known.block_size
        return replace(self.known, block_size=block_size, block_bytes=bytes_of_block)


def _described(config: ModelConfig) -> CachedModel:
    """Return an architecture, whose recurrent layers are Mamba-2, with values of 16 bits and states of 32."""
    pattern = config.hybrid_override_pattern
    kv_bytes = 2 * pattern.count("*") * config.query_groups * config.head_channels * ELEMENT_BYTES
    convolved = config.mamba_heads * config.mamba_head_dim + 2 * config.mamba_num_groups * config.mamba_state_dim
    window = convolved * (config.mamba_conv_kernel - 1) * ELEMENT_BYTES
    state_bytes = config.recurrent.state_size(config) * STATE_ELEMENT_BYTES + window
    costs = entry_costs(config, 1, kv_bytes, pattern.count("M") * state_bytes)
    return CachedModel(costs, config.max_position_embeddings)


def _nemotron() -> ModelConfig:
    """Return Nemotron-H with 8 billion parameters."""
    return ModelConfig(
        hybrid_override_pattern=_NEMOTRON,
        hidden_size=4096,
        ffn_hidden_size=21504,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        mamba_state_dim=128,
        mamba_head_dim=64,
        mamba_num_heads=128,
        mamba_num_groups=8,
        squared_relu=True,
        max_position_embeddings=131072,
    )


def _llama() -> ModelConfig:
    """Return Llama 3 with 8 billion parameters."""
    return ModelConfig(
        hybrid_override_pattern="*-" * 32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        swiglu=True,
        max_position_embeddings=131072,
    )


MODELS = {"nemotron-h-8b": _described(_nemotron()), "llama-3-8b": _described(_llama())}
