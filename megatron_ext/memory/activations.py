"""Bytes of the temporary tensors of one full step, counted from a model's shape.

Counted for the layer that needs most; layers follow each other, and their tensors are freed. Tests compare the count
with what steps of each kind of layer allocate, and at the sizes of real models with what their operators do. What the
references of the selective scan and of the gated delta rule take beyond kernels and operators in C++ is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.layers import is_attention, is_mlp, is_recurrent
from megatron_ext.config.model_fields import ModelFields

DECODE_SPAN, DECODE_GROUP, PREFILL_SPAN = 512, 16, 4096
"""Keys of a partial sum of attention on CUDA, and spans of a group of a decode's."""
DECODE_BYTES, DECODE_SLOTS = 64 << 20, 32
"""Bytes of the partial sums of decodes, or, with many of them, partial sums of each query head."""
SPLIT_TILES, SPLIT_ELEMENTS, TILE_ELEMENTS = 192, 192 * 64 * 128, 128 * 128
"""Tiles of a prefill whose keys are split, at most, query elements of them, and query elements of a tile."""
TILE = 64
"""Tokens of a tile of a recurrence on CUDA, which leaves a state for each tile."""
DRAWN_ROWS = 128
"""Rows that are drawn at once on CUDA, at most, each with scratch memory of its size."""
THREAD_SPANS, THREAD_ROWS, THREAD_KEYS = 16, 64, 64
"""Partial sums of attention that a thread of a CPU keeps in C++, rows of one, and keys of a tile."""
DRAWN_BYTES = 24
"""Bytes of a word that a thread of a CPU draws from in C++, at most: its key, and a key with its weight."""
_FP32 = 4  # bytes


@dataclass(frozen=True)
class FullStep:
    """Largest step of an engine.

    Attributes:
        tokens: Tokens of all chunks.
        requests: Chunks, each of which may yield a token.
        longest: Tokens of the longest request.
        is_cuda: Whether kernels for CUDA compute it.
        drafts: Drafts of a request that are verified, at most; each yields logits.
        threads: Threads that compute it on a CPU.
    """

    tokens: int
    requests: int
    longest: int
    is_cuda: bool
    drafts: int = 0
    threads: int = 1

    @property
    def sampled(self) -> int:
        """Rows of logits."""
        return min(self.tokens, self.requests * (1 + self.drafts))


@dataclass(frozen=True)
class LayerWidths:
    """Widths of this rank's layers that the architecture alone does not determine.

    Attributes:
        itemsize: Bytes of an element of the hidden states.
        share: Share of each layer that is on this rank.
        convolved: Channels of the convolution of recurrent layers; 0 without recurrent layers.
        state_elements: Elements of one sequence's recurrent state in one layer.
    """

    itemsize: int
    share: float = 1.0
    convolved: int = 0
    state_elements: int = 0


def activation_bytes(config: ModelFields, step: FullStep, widths: LayerWidths) -> int:
    """Return the bytes that the temporary tensors of a step take at most."""
    letters = set(config.hybrid_override_pattern)
    stream = 6 * config.hidden_size  # the residual, a norm's result, a layer's output, their sums
    elements = max(_elements(letter, config, widths) for letter in letters)
    found = step.tokens * (stream + elements) * widths.itemsize
    if config.is_moe:
        found += step.tokens * 4 * (config.num_experts or 0) * _FP32  # scores of experts
    if config.is_hybrid:
        found += (step.tokens // TILE + 2 * step.requests) * widths.state_elements * widths.itemsize
    words = config.vocab_size or 0
    if step.is_cuda:
        found += min(step.sampled, DRAWN_ROWS) * words * _FP32
    else:
        found += min(step.sampled, step.threads) * words * DRAWN_BYTES
    if any(map(is_attention, letters)):
        heads = math.ceil(config.num_attention_heads * widths.share)
        sums = _partial_sums(config, step, heads) if step.is_cuda else step.threads * thread_sums(config.head_channels)
        found += sums
    return found + step.sampled * words * (widths.itemsize + 2 * _FP32)


def thread_sums(head_channels: int) -> int:
    """Return the bytes of the partial sums of attention, and of its tiles, of one thread of a CPU."""
    sums = (THREAD_SPANS + 1) * THREAD_ROWS * (head_channels + 2)
    tiles = (5 * THREAD_ROWS + THREAD_KEYS) * (head_channels + THREAD_KEYS)  # queries, two sums, keys, values; scores
    return (sums + tiles) * _FP32


def _partial_sums(config: ModelFields, step: FullStep, heads: int) -> int:
    """Return the bytes of the partial sums of attention in a step of decodes, or of short prefills, on CUDA."""
    spans = math.ceil(step.longest / DECODE_SPAN)
    row = heads * (config.head_channels + 2) * _FP32
    many = step.requests * min(spans, max(DECODE_SLOTS, math.ceil(spans / DECODE_GROUP))) * row
    decodes = max(many, min(DECODE_BYTES, step.requests * spans * row))
    if step.longest <= PREFILL_SPAN:
        return decodes
    padded = 1 << (config.head_channels - 1).bit_length()
    rows = min(128, TILE_ELEMENTS // padded)
    most = min(SPLIT_TILES, SPLIT_ELEMENTS // (rows * padded))
    tiles = min(most, math.ceil(step.tokens * heads / rows) + step.requests * heads)
    return max(decodes, tiles * math.ceil(step.longest / PREFILL_SPAN) * rows * (config.head_channels + 2) * _FP32)


def _elements(letter: str, config: ModelFields, widths: LayerWidths) -> int:
    """Return the elements per token of a layer's temporary tensors."""
    found = _experts(config) if letter == "E" else 0
    if is_mlp(letter):
        found += (4 if config.is_gated else 3) * config.ffn_size
    if is_attention(letter):  # the projection, rotated queries, the result, a gate of it, a copy
        found += (5 * config.num_attention_heads + 3 * config.query_groups) * config.head_channels
    found = math.ceil(found * widths.share)
    if is_recurrent(letter):  # the projection, the convolution's result and its parts, outputs, their norm and gate
        found += 8 * widths.convolved + 2 * config.hidden_size
    return found


def _experts(config: ModelFields) -> int:
    """Return the elements of the chosen experts: permuted inputs and outputs, twice each, and intermediate results."""
    width = config.moe_latent_size or config.hidden_size
    inner = 4 if config.is_gated else 3
    shared = inner * (config.moe_shared_expert_intermediate_size or 0)
    return config.moe_router_topk * (4 * width + inner * config.expert_ffn_size) + shared
