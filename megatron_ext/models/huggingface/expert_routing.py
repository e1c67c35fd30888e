"""Softmax routing in a decoded `config.json`: experts, their weights, and the layers that have them.

A router's weights are a softmax over all experts. Dividing the weights of the chosen experts by their sum equals a
softmax over the chosen experts alone: megatron-core's default, unless `moe_router_pre_softmax` is set.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, layer_count, names, require_field, size, size_or
from megatron_ext.models.huggingface.moe import routed_experts

# Fields that `sparse_letters` reads, in addition to `num_experts`.
SPARSE_FIELDS = names("mlp_only_layers decoder_sparse_step")


def softmax_experts(fields: Fields, experts_name: str, *, is_normalized: bool) -> dict[str, object]:
    """Return the number of experts of a layer, the experts per token, and the kind of their weights.

    Args:
        fields: A decoded `config.json`.
        experts_name: Name of the field with the number of experts.
        is_normalized: Whether the weights of the chosen experts sum to one.

    Raises:
        ConfigError: A token would get more experts than there are, or a single one, whose normalized weight is always
            one.
    """
    count = routed_experts(fields, experts_name)
    experts, chosen = count["num_experts"], count["moe_router_topk"]
    if is_normalized and chosen == 1:
        raise ConfigError(
            f"config.json: num_experts_per_tok = 1 is not supported with {experts_name} = {experts}; supported are 2 "
            f"to {experts} where weights of the chosen experts are divided by their sum"
        )
    return {**count, "moe_router_score_function": "softmax", "moe_router_pre_softmax": not is_normalized}


def local_experts(fields: Fields) -> dict[str, object]:
    """Return the fields of `num_local_experts` softmax experts of size `intermediate_size`, as Mixtral names them.

    Raises:
        ConfigError: As `softmax_experts`; or a size is missing.
    """
    return {
        **softmax_experts(fields, "num_local_experts", is_normalized=True),
        "moe_ffn_hidden_size": size(fields, "intermediate_size"),
    }


def sparse_letters(fields: Fields) -> str:
    """Return E or - for each layer: experts in every `decoder_sparse_step`-th one but those in `mlp_only_layers`.

    Raises:
        ConfigError: A field is missing, or is not a list of layers.
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
