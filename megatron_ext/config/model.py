"""Architecture of a model: fields that have been checked, and its kind of recurrent layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.layers import LAYER_SYMBOLS
from megatron_ext.config.model_fields import LEARNED_POSITIONS, POSITION_EMBEDDINGS, ModelFields
from megatron_ext.config.options import flag_of, options_of, require, require_options
from megatron_ext.config.recurrent import RECURRENT_KINDS, RecurrentKind
from megatron_ext.errors import ConfigError

MAX_EXPERTS = 2**18  # of all layers together; far more than any model has
PREDICTION_LETTERS = "M*-E"  # of layers of multi-token prediction
MAX_PREDICTION_LAYERS = 64  # of all depths together


def check_attention(config: ModelFields) -> None:
    """Require heads that divide the width, and query groups that divide the heads."""
    require(
        config.kv_channels is not None or config.hidden_size % config.num_attention_heads == 0,
        f"hidden size {config.hidden_size} is not a multiple of {config.num_attention_heads} attention heads; "
        "change one of them or give --kv-channels",
    )
    require(
        config.num_attention_heads % config.query_groups == 0,
        f"{config.num_attention_heads} attention heads cannot be shared by {config.query_groups} query groups; "
        "the groups must divide the heads",
    )
    require(
        not config.qk_layernorm_over_heads
        or (config.qk_layernorm and config.normalization == "RMSNorm" and not config.apply_layernorm_1p),
        "qk_layernorm_over_heads needs --qk-layernorm and plain RMSNorm",
    )
    require(
        config.add_qkv_bias or not config.add_attention_output_bias,
        "add_attention_output_bias is for attention with biases of queries, keys and values; set add_qkv_bias too",
    )


def check_window(config: ModelFields) -> None:
    """Require a window if and only if the pattern has windowed layers (W)."""
    pattern, window = config.hybrid_override_pattern, config.attention_window
    has_layers = "W" in pattern
    require(
        window is not None or not has_layers, f"pattern {pattern!r} has attention in a window (W): set attention_window"
    )
    require(
        window is None or has_layers, f"attention_window {window} is for layers W, and pattern {pattern!r} has none"
    )


def check_positions(config: ModelFields) -> None:
    """Require a known embedding, and an even number of rotated channels."""
    kind = config.position_embedding_type
    require(
        kind in POSITION_EMBEDDINGS,
        f"position embedding type {kind!r} is unknown; one of {', '.join(POSITION_EMBEDDINGS)}",
    )
    require(
        not config.use_rope_scaling or kind == "rope",
        f"--use-rope-scaling needs --position-embedding-type rope, not {kind}",
    )
    share = config.rotary_percent
    rotated = int(config.head_channels * share)
    require(
        kind != "rope" or (rotated > 0 and rotated % 2 == 0),
        f"--rotary-percent {share} of an attention head of {config.head_channels} rotates {rotated} channels; "
        "rotary embeddings need an even number",
    )
    if config.yarn_rotary_scaling_factor is not None:
        _check_yarn(config, config.yarn_rotary_scaling_factor)


def _check_yarn(config: ModelFields, factor: float) -> None:
    given = f"yarn_rotary_scaling_factor {factor}"
    require(
        config.position_embedding_type == "rope" and not config.use_rope_scaling,
        f"{given} needs --position-embedding-type rope, without --use-rope-scaling",
    )
    require(config.rotary_base > 1, f"{given} needs a --rotary-base of more than 1")
    fast, slow = config.yarn_beta_fast, config.yarn_beta_slow
    require(
        math.isfinite(fast) and 0 < slow <= fast,
        f"{given} with yarn_beta_fast {fast} and yarn_beta_slow {slow}: the first must not be below the second, and "
        "both above zero",
    )
    magnitude = config.rotary_magnitude
    require(
        math.isfinite(magnitude) and magnitude > 0,
        f"{given} with yarn_mscale {config.yarn_mscale} and yarn_mscale_all_dim {config.yarn_mscale_all_dim} "
        f"multiplies queries and keys by {magnitude}, which must be more than zero",
    )


def check_mlp(config: ModelFields) -> None:
    """Require at most one activation flag, and a gate for its settings."""
    names = ("squared_relu", "swiglu", "quick_geglu")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(config, name)]
    require(len(given) <= 1, f"{' and '.join(given)} contradict each other; give one of them")
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    require(math.isfinite(offset), f"--glu-linear-offset {offset} must be a finite number")
    require(
        config.is_gated or (clamp is None and offset == 0),
        f"--activation-func-clamp-value {clamp} and --glu-linear-offset {offset} are for gated MLPs; give --swiglu or "
        "--quick-geglu",
    )
    require(
        config.mlp_gate_multiplier == 1 or (clamp is None and offset == 0),
        f"mlp_gate_multiplier {config.mlp_gate_multiplier} is not supported with --activation-func-clamp-value or "
        "--glu-linear-offset",
    )


def check_prediction(config: ModelFields) -> None:
    """Require layers of multi-token prediction whose letters are known, and that the trunk's settings describe."""
    depths, given = config.mtp_num_layers, config.mtp_hybrid_override_pattern
    if depths is None:
        require(
            given is None and not config.mtp_use_repeated_layer,
            "--mtp-hybrid-override-pattern and --mtp-use-repeated-layer need --mtp-num-layers",
        )
        return
    pattern, trunk = config.mtp_pattern, config.hybrid_override_pattern
    require(
        bool(pattern),
        f"--mtp-num-layers {depths} needs --mtp-hybrid-override-pattern, since {trunk!r} is not a GPT's pattern",
    )
    unknown = sorted(set(pattern) - set(PREDICTION_LETTERS))
    require(
        not unknown,
        f"--mtp-hybrid-override-pattern {pattern!r} has the letter {''.join(unknown)!r}; supported are "
        f"{', '.join(PREDICTION_LETTERS)}",
    )
    require(
        "M" not in pattern or config.is_hybrid,
        f"--mtp-hybrid-override-pattern {pattern!r} has recurrent layers, and {trunk!r} has none",
    )
    layers = len(pattern) * config.mtp_layer_count
    require(
        layers <= MAX_PREDICTION_LAYERS,
        f"{layers} layers of multi-token prediction are too many; there must be at most {MAX_PREDICTION_LAYERS}",
    )


def check_moe(config: ModelFields) -> None:
    """Require experts and a router that are consistent with each other and with the pattern."""
    pattern = config.hybrid_override_pattern + config.mtp_pattern * config.mtp_layer_count
    experts, chosen = config.num_experts, config.moe_router_topk
    if "E" not in pattern:
        require(
            experts is None,
            f"--num-experts {experts} is for MoE layers, and pattern {pattern!r} has none; put an E into it",
        )
        return
    if experts is None:
        raise ConfigError(f"pattern {pattern!r} has MoE layers (E), which need --num-experts")
    layers, limit = pattern.count("E"), MAX_EXPERTS // pattern.count("E")
    require(experts <= limit, f"--num-experts {experts} in each of {layers} layers must be at most {limit}")
    require(
        chosen <= experts,
        f"--moe-router-topk {chosen} experts of --num-experts {experts} cannot be chosen; give at most {experts}",
    )
    require(
        config.disable_bias_linear
        or (config.moe_shared_expert_intermediate_size is None and config.moe_latent_size is None),
        f"pattern {pattern!r} has MoE layers (E) with shared experts or a latent width, which have no biases; leave "
        "--no-disable-bias-linear out",
    )
    require(
        not config.moe_shared_expert_gate or config.moe_shared_expert_intermediate_size is not None,
        "--moe-shared-expert-gate is for shared experts; give --moe-shared-expert-intermediate-size too",
    )
    _check_router_scores(config)
    _check_router_groups(config, experts)


def _check_router_scores(config: ModelFields) -> None:
    if config.moe_router_score_function != "softmax":
        require(not config.moe_router_pre_softmax, "--moe-router-pre-softmax needs softmax scores")
        return
    use_sigmoid = "give --moe-router-score-function sigmoid"
    require(not config.moe_router_enable_expert_bias, f"--moe-router-enable-expert-bias needs sigmoid; {use_sigmoid}")
    require(
        config.moe_router_topk > 1 or config.moe_router_pre_softmax,
        f"--moe-router-topk 1 gives every expert the softmax weight 1; {use_sigmoid}, or --moe-router-pre-softmax",
    )


def _check_router_groups(config: ModelFields, experts: int) -> None:
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


def check_multipliers(config: ModelFields) -> None:
    """Require multipliers only for operations that the model has."""
    require(
        config.swiglu or config.mlp_gate_multiplier == 1,
        f"mlp_gate_multiplier {config.mlp_gate_multiplier} is for gated MLPs; give --swiglu",
    )
    require(
        config.position_embedding_type != LEARNED_POSITIONS or config.embedding_multiplier == 1,
        f"embedding_multiplier {config.embedding_multiplier} must be 1 with learned positions",
    )


# Bounds far above any real model: larger values are mistakes, or attempts to exhaust resources (SE-1).
MAX_LAYERS = 4096
LARGEST_SIZE = 2**24  # of every dimension and count


@dataclass(frozen=True)
class ModelConfig(ModelFields):
    """Model architecture, as saved with a checkpoint and used to build the model; its fields agree with each other.

    Raises:
        ConfigError: Fields are invalid, or contradict each other.
    """

    def __post_init__(self) -> None:
        self._check_pattern()
        self._check_sizes()
        require_options(self)
        check_attention(self)
        check_prediction(self)
        check_window(self)
        check_positions(self)
        if self.is_hybrid and self.recurrent.check is not None:
            self.recurrent.check(self)
        check_moe(self)
        require(
            not self.apply_layernorm_1p or self.normalization == "RMSNorm",
            f"--apply-layernorm-1p is not supported with --normalization {self.normalization}; give RMSNorm",
        )
        multipliers = self.mamba_multipliers
        require(
            multipliers is None or (len(multipliers) == 5 and all(math.isfinite(m) and m > 0 for m in multipliers)),
            f"mamba_multipliers {multipliers} must be five numbers above zero, for z, x, B, C and dt",
        )
        check_mlp(self)
        check_multipliers(self)

    def _check_pattern(self) -> None:
        pattern = self.hybrid_override_pattern
        require(len(pattern) > 0, "the hybrid pattern is empty; give at least one layer, as in 'M-*-'")
        require(len(pattern) <= MAX_LAYERS, f"a model of {len(pattern)} layers must have at most {MAX_LAYERS}")
        unknown = sorted(set(pattern) - set(LAYER_SYMBOLS))
        known = ", ".join(f"{symbol} ({name})" for symbol, name in LAYER_SYMBOLS.items())
        require(
            not unknown,
            f"pattern {pattern!r} has unknown letter {''.join(unknown)!r}; known are {known}, "
            "and all recurrent layers are of one kind, --recurrent-layer",
        )
        require(
            self.num_layers in (None, len(pattern)),
            f"--num-layers {self.num_layers} contradicts --hybrid-override-pattern {pattern!r} "
            f"of {len(pattern)} layers; leave --num-layers out or make them equal",
        )

    def _check_sizes(self) -> None:
        config: type = type(self)
        options = options_of(config)
        for name, value in self.to_dict().items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            declared = options.get(name)
            largest = LARGEST_SIZE if declared is None or declared.maximum is None else declared.maximum
            require(value <= largest, f"{flag_of(name)} {_digits(value)} must be at most {largest}")
            require(value > 0, f"{flag_of(name)} {_digits(value)} must be positive")

    @property
    def recurrent(self) -> RecurrentKind:
        """Record of the model's kind of recurrent layers."""
        return RECURRENT_KINDS[self.recurrent_layer]

    @property
    def scan_chunk_size(self) -> int:
        """Tokens of a chunk of recurrent layers; at inference the maximum, see `memory.budget`."""
        return self.recurrent.chunk_size(self)


def _digits(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "of more than 18 digits"
