"""Experts in a decoded `config.json`, in megatron-core's terms: sigmoid routing, and softmax routing.

Sigmoid routers compute scores in fp32, choose by score plus bias, and weight by the score. transformers' NemotronH and
megatron-core differ:

- megatron-core divides the chosen scores by their sum if there are several, never if there is one;
- it ranks groups of experts by their best top-k / open groups scores, transformers by their best two;
- transformers ignores `n_shared_experts`, other readers multiply by it: only 1 means the same to all.

The weights of a softmax router are a softmax over all experts. Dividing the weights of the chosen experts by their sum
equals a softmax over the chosen experts alone: megatron-core's default, unless `moe_router_pre_softmax` is set.
"""

from __future__ import annotations

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, names

_SCORES_PER_GROUP = 2

SIGMOID_FIELDS = names(
    """
    n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
    num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob
    """
)


def routed_experts(fields: Fields, experts_name: str) -> dict[str, object]:
    """Return the number of experts of a layer, from the field `experts_name`, and the experts per token.

    Raises:
        ConfigError: A token would get more experts than there are.
    """
    experts, chosen = fields.size(experts_name), fields.size("num_experts_per_tok")
    if chosen > experts:
        raise ConfigError(f"config.json: num_experts_per_tok {chosen} is more than {experts_name} {experts}")
    return {"num_experts": experts, "moe_router_topk": chosen}


def sigmoid_experts(fields: Fields) -> dict[str, object]:
    """Return the `ModelConfig` fields of a model with sigmoid routers.

    Raises:
        ConfigError: A field is missing, or has a value that megatron-core's router does not support; the message names
            it.
    """
    routed, chosen = routed_experts(fields, "n_routed_experts"), fields.size("num_experts_per_tok")
    if fields.get("n_shared_experts", 1) != 1:
        fields.refuse("n_shared_experts", "supported is 1, of width moe_shared_expert_intermediate_size")
    check_normalization(fields.flag("norm_topk_prob", default=True), chosen)
    groups, open_groups = _groups(fields, chosen)
    return {
        **routed,
        "moe_ffn_hidden_size": fields.size("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": fields.size("moe_shared_expert_intermediate_size"),
        "moe_latent_size": None if fields.get("moe_latent_size") is None else fields.size("moe_latent_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": groups,
        "moe_router_group_topk": open_groups,
        "moe_router_topk_scaling_factor": fields.number("routed_scaling_factor", default=1.0),
        "moe_router_enable_expert_bias": True,
    }


def described_experts(config: ModelConfig) -> dict[str, object]:
    """Return the fields of `config.json` for a model with sigmoid routers; the inverse of `sigmoid_experts`."""
    return {
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.moe_router_topk,
        "norm_topk_prob": config.moe_router_topk > 1,
        "moe_intermediate_size": config.expert_ffn_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
    }


def check_normalization(normalized: bool, chosen: int) -> None:
    """Check that a sigmoid router normalizes the chosen experts' weights exactly when megatron-core does.

    Args:
        normalized: Value of `norm_topk_prob`.
        chosen: Experts per token.
    """
    if normalized != (chosen > 1):
        wanted, reason = (False, "never with one") if normalized else (True, "always with several")
        raise ConfigError(
            f"config.json: norm_topk_prob = {normalized} is not supported with num_experts_per_tok = {chosen}; "
            f"megatron-core normalizes {reason}: supported is {wanted}"
        )


def _groups(fields: Fields, chosen: int) -> tuple[int | None, int | None]:
    """Return the number of expert groups and of those open to a token; None for both if all are open."""
    fields = Fields({"n_group": 1, "topk_group": 1, **fields})
    fields.check_divides("n_group", "n_routed_experts")
    groups, open_groups = fields.size("n_group"), fields.size("topk_group")
    given = f"config.json: n_group = {groups} with topk_group = {open_groups}"
    if open_groups > groups:
        raise ConfigError(f"{given} is not supported; at most all groups can be chosen")
    if open_groups == groups:
        return None, None
    if chosen // open_groups != _SCORES_PER_GROUP:
        raise ConfigError(
            f"{given} is not supported with num_experts_per_tok = {chosen}; megatron-core ranks a group by its best "
            f"num_experts_per_tok // topk_group scores, NemotronH by its best {_SCORES_PER_GROUP}"
        )
    return groups, open_groups


# Fields that `sparse_letters` reads, in addition to `num_experts`.
SPARSE_FIELDS = names("mlp_only_layers decoder_sparse_step")


def softmax_experts(fields: Fields, experts_name: str, width_name: str, *, is_normalized: bool) -> dict[str, object]:
    """Return the number and the width of a layer's experts, the experts per token, and the kind of their weights.

    Args:
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
    return {
        **count,
        "moe_ffn_hidden_size": fields.size(width_name),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not is_normalized,
    }


def local_experts(fields: Fields) -> dict[str, object]:
    """Return the fields of softmax experts, as Mixtral names them."""
    return softmax_experts(fields, "num_local_experts", "intermediate_size", is_normalized=True)


def sparse_letters(fields: Fields) -> str:
    """Return E or - for each layer: experts in every `decoder_sparse_step`-th one but those in `mlp_only_layers`.

    Raises:
        ConfigError: A field is missing, or is not a list of layers.
    """
    step, dense = fields.size("decoder_sparse_step", 1), fields.layer_numbers("mlp_only_layers")
    has_experts = fields.required("num_experts") != 0
    return "".join(
        "E" if has_experts and (index + 1) % step == 0 and index not in dense else "-"
        for index in range(fields.layer_count)
    )
