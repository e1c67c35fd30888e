"""Tensor tables of layer components, which families combine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.tensors import EXPERT, Conversion, LayerTable, Source

# Names of the norm before a layer.
ATTENTION_NORM = "input_layernorm"
RECURRENT_NORM = "norm"
MLP_NORM = "pre_mlp_layernorm"

# Our MLPs: plain, one routed expert, all shared experts together.
MLP = "mlp"
ROUTED_EXPERT = f"mlp.experts.local_experts.{EXPERT}"
SHARED_EXPERTS = "mlp.shared_experts"

_MAMBA1 = "in_proj.weight conv1d.weight conv1d.bias x_proj.weight dt_proj.weight dt_proj.bias A_log D out_proj.weight"
_MAMBA2 = "in_proj.weight conv1d.weight conv1d.bias A_log D dt_bias norm.weight out_proj.weight"


def copied(ours: str, theirs: str, names: Iterable[str]) -> LayerTable:
    """Map tensors with equal names and shapes from a part of theirs to a part of ours."""
    return {f"{ours}.{name}": Source((f"{theirs}.{name}",)) for name in names}


def weights(names: Mapping[str, str]) -> LayerTable:
    """Map weights of equal shapes, given as our part -> their part."""
    return {f"{ours}.weight": Source((f"{theirs}.weight",)) for ours, theirs in names.items()}


def mamba1_mixer(theirs: str) -> LayerTable:
    """Tensor table of a Mamba-1 mixer."""
    return copied("mixer", theirs, _MAMBA1.split())


def mamba2_mixer(theirs: str) -> LayerTable:
    """Tensor table of a Mamba-2 mixer."""
    return copied("mixer", theirs, _MAMBA2.split())


def attention(theirs: str) -> LayerTable:
    """Tensor table of attention, with the configured biases."""
    weight, bias = (tuple(f"{theirs}.{one}_proj.{kind}" for one in "qkv") for kind in ("weight", "bias"))
    return {
        "self_attention.linear_qkv.weight": Source(weight, QUERY_KEY_VALUE),
        "self_attention.linear_qkv.bias": Source(bias, QUERY_KEY_VALUE, needs="add_qkv_bias"),
        **weights({"self_attention.linear_proj": f"{theirs}.o_proj"}),
        "self_attention.linear_proj.bias": Source((f"{theirs}.o_proj.bias",), needs="add_attention_output_bias"),
    }


def query_and_key_norms(theirs: str) -> LayerTable:
    """Tensor table of the per-head norms of queries and keys."""
    return weights({f"self_attention.{one}_layernorm": f"{theirs}.{one}_norm" for one in "qk"})


def gated_mlp(ours: str, theirs: str) -> LayerTable:
    """Tensor table of a gated MLP of three matrices; ours has gate and up projection in one."""
    return {
        f"{ours}.linear_fc1.weight": Source((f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")),
        **weights({f"{ours}.linear_fc2": f"{theirs}.down_proj"}),
    }


def gated_mlp_biases(ours: str, theirs: str) -> LayerTable:
    """Tensor table of a gated MLP's biases, if configured."""
    return {
        f"{ours}.linear_fc1.bias": Source((f"{theirs}.gate_proj.bias", f"{theirs}.up_proj.bias"), needs="add_mlp_bias"),
        f"{ours}.linear_fc2.bias": Source((f"{theirs}.down_proj.bias",), needs="add_mlp_bias"),
    }


def plain_mlp(ours: str, theirs: str) -> LayerTable:
    """Tensor table of an MLP of two matrices."""
    return weights({f"{ours}.linear_fc1": f"{theirs}.up_proj", f"{ours}.linear_fc2": f"{theirs}.down_proj"})


def interleave_qkv(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Interleave query [Hq*D, ...], key and value [Hkv*D, ...] -> [(Hq + 2*Hkv)*D, ...] in groups of [q ... q k v].

    With an output gate each head of the query matrix is followed by its gate: [Hq*2*D, ...] -> groups of [q ... q gate
    ... gate k v]. These are the layouts that megatron-core's `SelfAttention` splits.
    """
    query, key, value = parts
    if config.attention_output_gate:
        heads = query.unflatten(0, (config.num_attention_heads, 2, -1))  # [Hq, 2, D, ...]
        parts = [*(heads[:, i].flatten(0, 1) for i in range(2)), key, value]
    grouped = [matrix.unflatten(0, (config.query_groups, -1)) for matrix in parts]  # each [groups, rows, ...]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _qkv_rows(config: ModelConfig) -> Sequence[int]:
    key_rows = config.query_groups * config.head_channels
    return config.num_attention_heads * config.head_channels * (1 + config.attention_output_gate), key_rows, key_rows


def separate_qkv(ours: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    """Split [(Hq + 2*Hkv)*D, ...] in groups as `interleave_qkv` makes them -> query, key and value."""
    size = config.head_channels
    queries = config.num_attention_heads // config.query_groups * size
    groups = ours.unflatten(0, (config.query_groups, -1))  # [groups, rows, ...]
    gates = [queries] if config.attention_output_gate else []
    query, *gate, key, value = (part.flatten(0, 1) for part in groups.split([queries, *gates, size, size], dim=1))
    if gate:
        query = torch.stack([part.unflatten(0, (-1, size)) for part in (query, *gate)], dim=1).flatten(0, 2)
    return query, key, value


QUERY_KEY_VALUE = Conversion(_qkv_rows, interleave_qkv, separate_qkv)
