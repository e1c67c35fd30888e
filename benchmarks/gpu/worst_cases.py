"""Calls of operators at their worst shapes: the sizes of real models and steps that kernels are checked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.operators.calls import BLOCK, Call
from megatron_ext.config import ModelConfig
from megatron_ext.models.build import build_model
from megatron_ext.ops.paged_attention import build_paged_batch, paged_attention
from megatron_ext.ops.sampling import SamplingMetadata, sample_tokens
from tools.kernel_checks.sizes import MAX_LENGTH, MODELS, Attention, Model, Step, steps

TOP_K, TOP_P = 50, 0.9
EXPERTS = ModelConfig(
    hybrid_override_pattern="E",
    hidden_size=4096,
    ffn_hidden_size=1536,
    num_attention_heads=32,
    vocab_size=64,
    num_experts=72,
    moe_router_topk=10,
    moe_ffn_hidden_size=768,
    moe_shared_expert_intermediate_size=1536,
    swiglu=True,
)
TINY_EXPERTS = dataclasses.replace(
    EXPERTS, hidden_size=32, num_attention_heads=2, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=16
)
MOE_TOKENS = (1, 64, 2048, 16_384)
MAX_KV_BYTES = 40 << 30
"""Bytes of the keys and values of one call; steps with more are left out."""


class WorstCases:
    """Calls of attention, sampling and experts at the shapes of `tools.kernel_checks.sizes`.

    Args:
        dtype: Dtype of inputs.
        device: Device of inputs.
        is_quick: Whether shapes are made small, to try the script.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, is_quick: bool = False) -> None:
        self._dtype, self._device, self._is_quick = dtype, device, is_quick

    def all(self) -> dict[str, Callable[[], Call]]:
        """Return makers of calls by name; one at a time takes memory. Nothing is allocated before."""
        found: dict[str, Callable[[], Call]] = {}
        for model in _distinct_attention():
            for step in steps():
                if self.kv_bytes(model.attention, step) <= MAX_KV_BYTES:
                    name = f"attention of {model.name}, {step.name}"
                    found[name] = partial(self._attention, model.attention, self._step(step))
        model = max(MODELS, key=lambda one: one.vocabulary)
        for step in steps():
            if step.decodes and step.context == MAX_LENGTH - 16_384:
                name = f"{step.decodes} tokens of {model.vocabulary:,} words, top_k and top_p"
                found[name] = partial(self._draw, step.decodes, model.vocabulary // (1024 if self._is_quick else 1))
        for tokens in MOE_TOKENS:
            name = f"MoE layer of {EXPERTS.num_experts} experts, {tokens:,} tokens"
            found[name] = partial(self._experts, min(tokens, 4) if self._is_quick else tokens)
        return found

    def kv_bytes(self, sizes: Attention, step: Step) -> int:
        """Return the bytes of the keys and values of a step."""
        return (step.decodes or 1) * step.keys * 2 * sizes.kv_heads * sizes.head_size * self._dtype.itemsize

    def _step(self, step: Step) -> Step:
        if not self._is_quick:
            return step
        small = {"decodes": min(step.decodes, 2), "tokens": min(step.tokens, 4), "context": step.context // 1024}
        return dataclasses.replace(step, **small)

    def _attention(self, sizes: Attention, step: Step) -> Call:
        """Decodes are bound by the bytes of keys and values, and long prefills by operations."""
        requests, blocks = step.decodes or 1, -(-step.keys // BLOCK)
        queries = [1] * step.decodes or [step.tokens]
        tables = [range(row * blocks, (row + 1) * blocks) for row in range(requests)]
        batch = build_paged_batch(tables, queries, [step.keys] * requests, step.decodes, BLOCK, self._device)
        if step.is_captured and not self._is_quick:
            table = batch.block_table.new_zeros(requests, -(-MAX_LENGTH // BLOCK))
            table[:, :blocks] = batch.block_table
            batch = dataclasses.replace(batch, block_table=table)
        shape = (requests * blocks, BLOCK, sizes.kv_heads, sizes.head_size)
        q, caches = self._random(step.rows, sizes.heads, sizes.head_size), [self._random(*shape) for _ in range(2)]
        work = partial(paged_attention, q, *caches, batch, scale=sizes.head_size**-0.5)
        pairs = step.tokens * (step.context + step.tokens / 2)
        if step.decodes or step.tokens <= 256:
            return Call(work, float(self.kv_bytes(sizes, step)), "TB", has_reference=False)
        return Call(work, 4.0 * pairs * sizes.heads * sizes.head_size, "TFLOP", has_reference=False)

    def _draw(self, rows: int, words: int) -> Call:
        logits = self._random(rows, words)
        one = torch.ones(rows, dtype=torch.float64, device=self._device)
        top_k = torch.full((rows,), TOP_K, dtype=torch.int64, device=self._device)
        metadata = SamplingMetadata(0.8 * one, top_k, TOP_P * one, 0.5 * one)
        moved = float(logits.numel() * logits.element_size())
        return Call(partial(sample_tokens, logits, metadata), moved, "TB", has_reference=False)

    def _experts(self, tokens: int) -> Call:
        """Compute a whole layer: the router, chosen experts, shared ones."""
        config = TINY_EXPERTS if self._is_quick else EXPERTS
        layer = build_model(config, device=self._device, dtype=self._dtype).decoder.layers[0].mlp
        hidden = self._random(tokens, 1, config.hidden_size)
        width = (config.moe_router_topk or 0) * (config.moe_ffn_hidden_size or 0)
        width += config.moe_shared_expert_intermediate_size or 0
        operations = 2.0 * tokens * config.hidden_size * 3 * width
        return Call(lambda: layer(hidden), operations, "TFLOP", has_reference=False)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)


def _distinct_attention() -> list[Model]:
    """Return the first model of each shape of attention."""
    return list({model.attention: model for model in reversed(MODELS)}.values())[::-1]
