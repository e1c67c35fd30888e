"""Sizes of models, and of steps, that kernels are checked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LONGEST = 131_072
"""Largest number of cached tokens."""
MAX_LENGTH = LONGEST + 16_384
"""Tokens of the longest request: width of block tables in captured steps."""
BLOCK = 64
"""Tokens of a block."""


@dataclass(frozen=True)
class Attention:
    """Attention layers: query heads, KV heads, head size, rotated channels of a head."""

    heads: int
    kv_heads: int
    head_size: int
    rotated: int = 0


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2 layers: heads, their channels, groups, states."""

    layers: int
    heads: int
    head_dim: int
    groups: int
    states: int

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return self.heads * self.head_dim + 2 * self.groups * self.states

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the recurrent state."""
        return self.heads, self.head_dim, self.states


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets: value heads, key heads, channels of both."""

    layers: int
    heads: int
    key_heads: int
    head_dim: int

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution."""
        return (self.heads + 2 * self.key_heads) * self.head_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the recurrent state."""
        return self.heads, self.head_dim, self.head_dim


@dataclass(frozen=True)
class Model:
    """Sizes of a model; `gated` MLPs have two inner products of `mlp` channels; a token has `chosen` of `experts`."""

    name: str
    hidden: int
    vocabulary: int
    attention: Attention
    recurrence: Mamba2 | DeltaNet
    mlp: int
    gated: bool = True
    experts: int = 0
    chosen: int = 10


MODELS = (
    Model("Nemotron-H 8B", 4096, 131_072, Attention(32, 8, 128), Mamba2(24, 128, 64, 8, 128), mlp=21_504, gated=False),
    Model("Granite 4 H Small", 4096, 100_352, Attention(32, 8, 128), Mamba2(36, 128, 64, 1, 128), mlp=1536, experts=72),
    Model("Qwen3-Next", 2048, 151_936, Attention(16, 2, 256, 64), DeltaNet(36, 32, 16, 128), mlp=512, experts=512),
    Model("Falcon-H1 7B", 3072, 130_048, Attention(12, 2, 128, 128), Mamba2(44, 24, 128, 1, 256), mlp=12_288),
)


@dataclass(frozen=True)
class Step:
    """Step of `decodes` rows with `context` keys each, or of prefills of `tokens` each after `context` cached ones.

    Attributes:
        decodes: Requests that decode.
        tokens: Tokens of a prefill; 0 for none.
        context: Tokens that are in the cache: of each decode, its own one included; before the prefill.
        is_captured: True if block tables are as wide as the longest request's.
        prefills: Number of prefills.
        snapshots: States that each prefill keeps.
    """

    decodes: int
    tokens: int
    context: int
    is_captured: bool
    prefills: int = 1
    snapshots: int = 1

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.decodes:
            return f"{self.decodes} decodes at {self.context:,}"
        crowd = f"{self.prefills} x {self.snapshots} snapshots, " if self.prefills > 1 else ""
        return f"{crowd}{self.tokens:,} tokens after {self.context:,}"

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return self.decodes + self.tokens * self.prefills

    @property
    def keys(self) -> int:
        """Keys of each sequence."""
        return self.context + self.tokens


def steps() -> Iterator[Step]:
    """Yield the steps that kernels are checked at."""
    for decodes in (1, 64, 256):
        for context in (2048, 32_768, LONGEST):
            yield Step(decodes, 0, context, is_captured=True)
    for tokens in (64, 2048, 16_384):
        for context in (0, 8192, LONGEST):
            yield Step(0, tokens, context, is_captured=tokens <= 256)
    for prefills, snapshots in ((28, 9), (56, 9), (28, 18)):
        yield Step(0, 576, LONGEST, is_captured=False, prefills=prefills, snapshots=snapshots)
