"""Self-attention over the block table, for dynamic batching; megatron-core's own for training."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import get_pg_rank
from torch import Tensor

from megatron_ext.mcore.layers.layer_config import LayerConfig, with_biases
from megatron_ext.mcore.layers.norms import HeadsNorm, OutputNorm
from megatron_ext.ops.gated_norm import NamedNorm
from megatron_ext.ops.paged_attention import paged_attention
from megatron_ext.ops.rotary import Heads


class PagedSelfAttention(SelfAttention):
    """`SelfAttention` whose dynamic-batching forward needs no flash-attn and runs on any device.

    Parameters, names and the training forward are upstream's. Upstream's dynamic forward asserts on flash-attn before
    any hook that could be overridden, so that forward is ours.
    """

    def __init__(
        self, config: TransformerConfig, submodules: SelfAttentionSubmodules, *args: object, **kwargs: object
    ) -> None:
        if not config.qk_layernorm:
            submodules = dataclasses.replace(submodules, q_layernorm=None, k_layernorm=None)
        super().__init__(with_biases(config, "add_attention_output_bias"), submodules, *args, **kwargs)
        self.window: int | None = None  # tokens that a query attends to; None for all previous tokens
        self._magnitude = getattr(config, "rotary_magnitude", 1.0)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within `hidden_states` [s, b, h], or, with a dynamic context, over the cache ([T, 1, h]).

        A missing `attention_mask` means causal. `rotary_pos_emb` holds the angles of all positions, [n, 1, 1, D].
        Returns output and bias, as upstream.
        """
        if inference_context is not None and inference_context.is_dynamic_batching():
            return self._forward_paged(hidden_states, inference_context, rotary_pos_emb)
        if attention_mask is None:
            attention_mask = _everywhere(hidden_states).triu(diagonal=1)
        if self.window is not None:
            attention_mask = attention_mask | _everywhere(hidden_states).tril(diagonal=-self.window)
        return super().forward(
            hidden_states,
            attention_mask,
            key_value_states=key_value_states,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            **kwargs,
        )

    def _forward_paged(
        self, hidden_states: Tensor, context: BaseInferenceContext, rotary_pos_emb: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        heads, gate = self._heads(hidden_states)
        rotation = None if rotary_pos_emb is None else context.rotation(rotary_pos_emb, self._magnitude)
        layer = self.layer_number - self._get_pp_layer_offset_for_inference()
        query = context.append_rotated(layer, heads, rotation)
        key_cache, value_cache = context.key_value_cache(layer)
        scale = self.config.softmax_scale or self.hidden_size_per_attention_head**-0.5
        sinks = self.core_attention.softmax_offset  # of each query head of this rank, or None
        output = paged_attention(
            query, key_cache, value_cache, context.paged_batch, scale=scale, window=self.window, sinks=sinks
        )
        output = output.flatten(1).unsqueeze(1)
        return self.linear_proj(output if gate is None else self._apply_output_gate(output, gate))

    def _heads(self, hidden_states: Tensor) -> tuple[Heads, Tensor | None]:
        """Return queries, keys and values of [T, 1, h], and the output gate, [T, 1, heads, D], if there is one.

        If heads are only normed one by one, the results are views of the projection; upstream copies queries.
        """
        if self._has_plain_heads():
            mixed, sizes = self.get_query_key_value_tensors(hidden_states, None, split_qkv=False)
            query, key, value = mixed.squeeze(1).split(sizes, dim=-1)  # [T, groups, .]
            is_normed = isinstance(self.q_layernorm, NamedNorm)
            norms = (self.q_layernorm, self.k_layernorm) if is_normed else None
            return Heads(query.unflatten(-1, (-1, key.shape[-1])), key, value, norms), None
        is_gated = self.config.attention_output_gate
        query, key, value, *gate = self.get_query_key_value_tensors(hidden_states, None, output_gate=is_gated)
        query, key, value = (one.squeeze(1) for one in (query, key, value))
        return Heads(query.unsqueeze(1), key, value), gate[0] if is_gated else None

    def _has_plain_heads(self) -> bool:
        """Return whether heads have per-head norms or none, are not shared between ranks, and outputs have no gate."""
        norms = (self.q_layernorm, self.k_layernorm)
        is_bare = all(isinstance(one, IdentityOp | None) for one in norms)
        is_normed = all(isinstance(one, NamedNorm) and not isinstance(one, HeadsNorm) for one in norms)
        is_shared = (self.config.num_query_groups or self.config.num_attention_heads) < self.world_size
        return (is_bare or is_normed) and not (is_shared or self.config.attention_output_gate or self.config.test_mode)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply outputs [s, b, heads * D] by sigmoid(gate [s, b, heads, D]); upstream uses `torch.compile`.

        If several ranks share a key/value head, upstream's gate covers the query heads of all of them.
        """
        heads = x.shape[-1] // gate.shape[-1]
        if gate.shape[2] > heads:
            first = get_pg_rank(self.pg_collection.tp) * heads % gate.shape[2]
            gate = gate[:, :, first : first + heads]
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


class WindowedSelfAttention(PagedSelfAttention):
    """`PagedSelfAttention` with a sliding window: queries attend to the last `config.attention_window` tokens only."""

    def __init__(self, config: LayerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(config, *args, **kwargs)
        self.window = config.attention_window


class NormedSelfAttention(PagedSelfAttention):
    """`PagedSelfAttention` with a norm of its output and none of its input."""

    def __init__(self, config: TransformerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.output_norm = OutputNorm(config)

    def forward(self, *inputs: object, **options: object) -> tuple[Tensor, Tensor | None]:
        """Attend and normalize the output, see `PagedSelfAttention.forward`; return None as bias."""
        output, bias = super().forward(*inputs, **options)  # type: ignore[arg-type]  # as upstream gives them
        return self.output_norm(output, bias), None


def _everywhere(hidden_states: Tensor) -> Tensor:
    """Return a mask [1, 1, s, s] of [s, b, h] that hides all: True is hidden in Megatron's sense."""
    length = hidden_states.shape[0]
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=hidden_states.device)
