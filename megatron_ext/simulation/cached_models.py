"""Models by name, described by their cache costs: costs of tokens, and sizes of blocks and states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from megatron_ext.config import ModelConfig
from megatron_ext.config.costs import EntryCosts, entry_costs

_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


class CachedModel(Protocol):
    """Interface of a model in the simulation."""

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sequence."""

    def costs(self, block_size: int) -> EntryCosts:
        """Return the costs with blocks of this many tokens."""


@dataclass(frozen=True)
class KnownModel:
    """Model described by its token costs, as a server reports them.

    Attributes:
        known: Costs at one block size.
        longest: Maximum number of tokens of a sequence.
    """

    known: EntryCosts
    longest: int

    def costs(self, block_size: int) -> EntryCosts:
        """Return the costs with blocks of this many tokens."""
        bytes_of_block = self.known.block_bytes * block_size // self.known.block_size
        return replace(self.known, block_size=block_size, block_bytes=bytes_of_block)


@dataclass(frozen=True)
class SimulatedModel:
    """Model described by its architecture and element sizes.

    Attributes:
        config: Architecture; recurrent layers are Mamba-2.
        element_bytes: Bytes of an element of parameters, keys, values and convolution states.
        state_element_bytes: Bytes of an element of recurrent states.
    """

    config: ModelConfig
    element_bytes: int = 2
    state_element_bytes: int = 4

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of all attention layers, per token."""
        config = self.config
        layers = config.hybrid_override_pattern.count("*")
        return 2 * layers * config.query_groups * config.head_channels * self.element_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot; 0 without recurrent layers."""
        config = self.config
        inner = config.mamba_heads * config.mamba_head_dim
        convolved = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
        window = convolved * (config.mamba_conv_kernel - 1) * self.element_bytes
        layer = config.recurrent.state_size(config) * self.state_element_bytes + window
        return config.hybrid_override_pattern.count("M") * layer

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.config.max_position_embeddings

    def reaching(self, tokens: int) -> SimulatedModel:
        """Return the same model with another maximum number of tokens of a sequence."""
        return replace(self, config=replace(self.config, max_position_embeddings=tokens))

    def costs(self, block_size: int) -> EntryCosts:
        """Return the costs with blocks of this many tokens."""
        return entry_costs(self.config, block_size, block_size * self.kv_bytes_per_token, self.state_bytes)


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


MODELS = {"nemotron-h-8b": SimulatedModel(_nemotron()), "llama-3-8b": SimulatedModel(_llama())}
