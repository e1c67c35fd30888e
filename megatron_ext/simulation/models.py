"""Models by name, as far as a cache knows them: what their tokens cost, and what blocks and states take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from megatron_ext.config import ModelConfig
from megatron_ext.config.costs import EntryCosts, entry_costs

_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


class CachedModel(Protocol):
    """What is asked of a model."""

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most."""

    def costs(self, block_size: int) -> EntryCosts:
        """With blocks of so many tokens."""


@dataclass(frozen=True)
class KnownModel:
    """A model by what its tokens cost, as a server says it.

    Attributes:
        known: Its costs with some block size.
        longest: Tokens of a sequence at most.
    """

    known: EntryCosts
    longest: int

    def costs(self, block_size: int) -> EntryCosts:
        """With blocks of so many tokens."""
        bytes_of_block = self.known.block_bytes * block_size // self.known.block_size
        return replace(self.known, block_size=block_size, block_bytes=bytes_of_block)


@dataclass(frozen=True)
class SimulatedModel:
    """An architecture and the bytes of its types.

    Attributes:
        config: Its layers; recurrent ones are Mamba-2.
        element_bytes: Of parameters, keys, values and convolution states.
        state_element_bytes: Of recurrent states.
    """

    config: ModelConfig
    element_bytes: int = 2
    state_element_bytes: int = 4

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all attention layers."""
        config = self.config
        layers = config.hybrid_override_pattern.count("*")
        return 2 * layers * config.query_groups * config.head_channels * self.element_bytes

    @property
    def state_bytes(self) -> int:
        """Of one snapshot; 0 without recurrent layers."""
        config = self.config
        inner = config.mamba_heads * config.mamba_head_dim
        convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
        window = convolved * (config.mamba_conv_kernel - 1) * self.element_bytes
        layer = config.recurrent.state_size(config) * self.state_element_bytes + window
        return config.hybrid_override_pattern.count("M") * layer

    @property
    def longest(self) -> int:
        """Tokens of a sequence at most."""
        return self.config.max_position_embeddings

    def costs(self, block_size: int) -> EntryCosts:
        """With blocks of so many tokens."""
        return entry_costs(self.config, block_size, block_size * self.kv_bytes_per_token, self.state_bytes)


def _nemotron() -> ModelConfig:
    """Nemotron-H of 8 billion parameters."""
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
    """Llama 3 of 8 billion parameters."""
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


MODELS = {"nemotron-h-8b": SimulatedModel(_nemotron()), "llama-3-8b": SimulatedModel(_llama())}
