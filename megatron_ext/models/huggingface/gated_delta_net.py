"""Gated delta nets: their fields in a decoded `config.json`, and the mapping of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.fields import Fields, layer_count, size_or
from megatron_ext.models.huggingface.layer_letters import check_count, listed_letters
from megatron_ext.models.huggingface.tensors import Conversion, PredictionTable, Source

DELTA_NET_SIZES: Mapping[str, str] = {
    name: name
    for name in (
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
    )
}
QWEN_PREDICTION = PredictionTable(
    {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "final_layernorm.weight": "mtp.norm.weight",
    }
)
_LETTERS = {"linear_attention": "M", "full_attention": "*"}
_DEFAULT_ATTENTION_INTERVAL = 4


def delta_net_or_attention(fields: Fields) -> str:
    """Return the letter of each layer: M for a gated delta net, * for attention.

    `layer_types` lists the layers; without it every `full_attention_interval`-th layer is attention.
    """
    count = layer_count(fields)
    if fields.get("layer_types") is None:
        interval = size_or(fields, "full_attention_interval", _DEFAULT_ATTENTION_INTERVAL)
        return "".join("M" if (index + 1) % interval else "*" for index in range(count))
    letters = listed_letters(fields, "layer_types", _LETTERS)
    check_count(count, letters, "layer_types")
    return letters


def _channels(config: ModelConfig) -> tuple[int, int]:
    """Return the channels of all queries (equal to all keys), and of all values."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, config.linear_num_value_heads * config.linear_value_head_dim


def stacked_inputs(parts: Mapping[str, str]) -> Source:
    """Source of an input projection whose parts of unequal heights are concatenated by rows in ours.

    Args:
        parts: Names of the parts, in order -> contents of each: q, k, v, z (the gate), b (beta) and a (alpha).
    """
    assert "".join(parts.values()) == "qkvzba", parts

    def rows(config: ModelConfig) -> list[int]:
        keys, values = _channels(config)
        heads = config.linear_num_value_heads
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
        return [sum(sizes[one] for one in held) for held in parts.values()]

    def put_together(tensors: Sequence[Tensor], _: ModelConfig) -> Tensor:
        return torch.cat(tuple(tensors))

    def take_apart(ours: Tensor, config: ModelConfig) -> Sequence[Tensor]:
        return ours.split(rows(config))

    return Source(tuple(parts), Conversion(rows, put_together, take_apart))


def norm_around_one(name: str) -> Source:
    """Source of an output norm that multiplies by its weight in theirs, and by 1 + weight in ours."""
    return Source(
        (name,),
        Conversion(
            lambda config: [config.linear_value_head_dim],
            lambda parts, _: parts[0].float() - 1.0,
            lambda ours, _: [ours.float() + 1.0],
        ),
    )
