"""Mixtures of experts whose routers go by a softmax, in a decoded `config.json`, and which layers have them.

A router's weights are a softmax over all experts. Those of the chosen experts may be divided by their sum, which is
what a softmax over the chosen ones alone gives: megatron-core's way, unless it is told `moe_router_pre_softmax`.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, layer_count, names, require_field, size_or
from megatron_ext.models.huggingface.moe import routed_experts

# What `sparse_letters` reads, beside `num_experts`.
SPARSE_FIELDS = names("mlp_only_layers decoder_sparse_step")


def softmax_experts(fields: Fields, experts_name: str, *, is_normalized: bool) -> dict[str, object]:
    """How many experts a layer has, in the field of that name, how many a token gets, and by which weights.

    Args:
        fields: A decoded `config.json`.
        experts_name: Of the field that says how many there are.
        is_normalized: Whether the weights of the chosen experts sum to one.

    Raises:
        ConfigError: More than there are, or one whose weight would be one whatever the router says.
    """
    told = routed_experts(fields, experts_name)
    experts, chosen = told["num_experts"], told["moe_router_topk"]
    if is_normalized and chosen == 1:
        raise ConfigError(
            f"config.json: num_experts_per_tok = 1 is not supported with {experts_name} = {experts}; supported are 2 "
            f"to {experts} where weights of the chosen experts are divided by their sum"
        )
    return {**told, "moe_router_score_function": "softmax", "moe_router_pre_softmax": not is_normalized}


def sparse_letters(fields: Fields) -> str:
    """E or - for each layer: experts in every `decoder_sparse_step`-th one but those in `mlp_only_layers`.

    Raises:
        ConfigError: A field is missing, or is no list of layers.
    """
    count, step = layer_count(fields), size_or(fields, "decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int or not 0 <= index < count for index in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers = {dense!r} is not supported; it must be a list of layers, 0 to {count - 1}"
        )
    has_experts = require_field(fields, "num_experts") != 0
    sparse = {index for index in range(count) if has_experts and (index + 1) % step == 0} - set(dense)
    return "".join("E" if index in sparse else "-" for index in range(count))
