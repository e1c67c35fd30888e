"""Fields of mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.config.layers.mlp import MlpFields
from megatron_ext.errors import ConfigError

ROUTER_SCORE_FUNCTIONS = ("softmax", "sigmoid")
MAX_EXPERTS = 2**18  # of all layers together; far more than any model has


@dataclass(frozen=True)
class MoeFields(MlpFields):
    """Fields of mixtures of experts, which are MLPs."""

    num_experts: int | None = None  # of each E layer
    moe_ffn_hidden_size: int | None = None  # of one expert; default: ffn_hidden_size
    moe_shared_expert_intermediate_size: int | None = None  # default: no shared experts
    moe_shared_expert_gate: bool = False  # a sigmoid of the layer's input, on the shared experts' output
    moe_latent_size: int | None = None  # width of the routed experts' inputs and outputs; default: hidden_size
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_num_groups: int | None = None  # default: one group
    moe_router_group_topk: int | None = None  # groups that a token may choose from; default: all
    moe_router_pre_softmax: bool = False  # weights are a softmax over all experts, not over those chosen
    moe_router_topk_scaling_factor: float | None = None  # default: 1
    moe_router_enable_expert_bias: bool = False

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_size


def check_moe(config: MoeFields, pattern: str) -> None:
    """Require experts and a router that are consistent with each other and with the pattern."""
    experts, chosen = config.num_experts, config.moe_router_topk
    if "E" not in pattern:
        require(
            experts is None,
            f"--num-experts {experts} is for MoE layers, and pattern {pattern!r} has none; put an E into it",
        )
        return
    if experts is None:
        raise ConfigError(f"pattern {pattern!r} has MoE layers (E), which need --num-experts")
    layers, most = pattern.count("E"), MAX_EXPERTS // pattern.count("E")
    require(
        experts <= most,
        f"--num-experts {experts} in each of {layers} layers are too many; at most {most} would do",
    )
    require(
        chosen <= experts,
        f"--moe-router-topk {chosen} experts of --num-experts {experts} cannot be chosen; give at most {experts}",
    )
    require(
        config.disable_bias_linear,
        f"pattern {pattern!r} has MoE layers (E), which have no biases; leave --no-disable-bias-linear out",
    )
    require(
        not config.moe_shared_expert_gate or config.moe_shared_expert_intermediate_size is not None,
        "--moe-shared-expert-gate is for shared experts; give --moe-shared-expert-intermediate-size too",
    )
    scale = config.moe_router_topk_scaling_factor
    require(
        scale is None or (math.isfinite(scale) and scale > 0),
        f"--moe-router-topk-scaling-factor {scale} must be more than zero",
    )
    _check_router_scores(config)
    _check_router_groups(config, experts)


def _check_router_scores(config: MoeFields) -> None:
    scores = config.moe_router_score_function
    require(
        scores in ROUTER_SCORE_FUNCTIONS,
        f"router score function {scores!r} is unknown; one of {', '.join(ROUTER_SCORE_FUNCTIONS)}",
    )
    if scores != "softmax":
        require(not config.moe_router_pre_softmax, "--moe-router-pre-softmax needs softmax scores")
        return
    use_sigmoid = "give --moe-router-score-function sigmoid"
    require(not config.moe_router_enable_expert_bias, f"--moe-router-enable-expert-bias needs sigmoid; {use_sigmoid}")
    require(
        config.moe_router_topk > 1 or config.moe_router_pre_softmax,
        f"--moe-router-topk 1 gives every expert the softmax weight 1; {use_sigmoid}, or --moe-router-pre-softmax",
    )


def _check_router_groups(config: MoeFields, experts: int) -> None:
    groups, open_groups = config.moe_router_num_groups, config.moe_router_group_topk
    if groups is None and open_groups is None:
        return
    given = f"--moe-router-num-groups {groups} and --moe-router-group-topk {open_groups}"
    if groups is None or open_groups is None:
        raise ConfigError(f"{given}: give both or neither")
    chosen = config.moe_router_topk
    require(experts % groups == 0, f"{given}: {groups} groups cannot share {experts} experts evenly")
    require(open_groups <= groups, f"{given}: at most {groups} groups can be open")
    require(
        open_groups <= chosen <= open_groups * experts // groups,
        f"{given}: {open_groups} groups of {experts // groups} experts give at least {open_groups} and "
        f"at most {open_groups * experts // groups} experts to a token, not --moe-router-topk {chosen}",
    )
