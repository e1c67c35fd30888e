"""The architecture of a model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron_ext.config.checks import flag_of, require

LAYER_SYMBOLS = {"M": "recurrent", "*": "attention", "-": "MLP", "E": "MoE"}
POSITION_EMBEDDINGS = ("none", "rope", "learned_absolute")
NORMALIZATIONS = ("RMSNorm", "LayerNorm")
ROUTER_SCORE_FUNCTIONS = ("softmax", "sigmoid")
RECURRENT_LAYERS = ("mamba2", "mamba1", "gated_delta_net")
GATED_DELTA_CHUNK = 64  # tokens; the cost of a longer one grows, that of a shorter one does not fall
INNER_NORMS = ("none", "plain", "weighted")
# What no model comes near to. Who writes more makes a mistake, or wants it to be computed with (SE-1).
MOST_LAYERS = 4096
MOST_EXPERTS = 2**18  # of all layers together
LARGEST_SIZE = 2**24  # of every dimension and count
_LARGEST = {"rotary_base": 2**53, "mamba_conv_kernel": 1024, "linear_conv_kernel_dim": 1024}  # where it is another


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: what a checkpoint saves and a builder needs. Defaults: a tiny hybrid."""

    hybrid_override_pattern: str = "M-M*M-M-"  # one letter a layer, see LAYER_SYMBOLS
    recurrent_layer: str = RECURRENT_LAYERS[0]  # what an M in the pattern is
    num_layers: int | None = None  # default: the pattern's length
    hidden_size: int = 256
    ffn_hidden_size: int | None = None  # default: 4 * hidden_size
    num_attention_heads: int = 4
    group_query_attention: bool = False
    num_query_groups: int | None = None  # default: num_attention_heads, or 1 with group_query_attention
    kv_channels: int | None = None  # default: hidden_size // num_attention_heads
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_heads: int | None = None  # default: 2 * hidden_size // mamba_head_dim
    mamba_num_groups: int = 8
    mamba_conv_kernel: int = 4
    mamba_chunk_size: int = 128
    mamba_inner_size: int | None = None  # channels of Mamba-1; default: 2 * hidden_size
    mamba_dt_rank: int | None = None  # of Mamba-1; default: a sixteenth of hidden_size
    mamba_inner_norm: str = INNER_NORMS[0]  # of Mamba-1: RMS norms of dt, B and C, without or with weights
    mamba_inner_norm_epsilon: float | None = None  # default: norm_epsilon
    linear_key_head_dim: int = 128  # of gated delta nets, as are the next four
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_conv_kernel_dim: int = 4
    qk_layernorm: bool = False  # of each head, before rotation
    attention_output_gate: bool = False  # a sigmoid of the layer's input, on each channel
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
    position_embedding_type: str = "none"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False  # of long wavelengths, as Llama 3.1 does it
    rope_scaling_factor: float = 8.0
    normalization: str = "RMSNorm"
    norm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False  # norms multiply by 1 + weight
    squared_relu: bool = False
    swiglu: bool = False
    disable_bias_linear: bool = True
    untie_embeddings_and_output_weights: bool = False
    max_position_embeddings: int = 4096
    vocab_size: int | None = None  # default: the tokenizer's
    spec: tuple[str, str] | None = None  # (module, name) of a stack spec; default: ours

    def __post_init__(self) -> None:
        self._check_pattern()
        self._check_sizes()
        kind = self.recurrent_layer
        require(
            kind in RECURRENT_LAYERS, f"--recurrent-layer {kind!r} is unknown; one of {', '.join(RECURRENT_LAYERS)}"
        )
        require(
            self.kv_channels is not None or self.hidden_size % self.num_attention_heads == 0,
            f"hidden size {self.hidden_size} is not a multiple of {self.num_attention_heads} attention heads; "
            "change one of them or give --kv-channels",
        )
        require(
            self.num_attention_heads % self.query_groups == 0,
            f"{self.num_attention_heads} attention heads cannot be shared by {self.query_groups} query groups; "
            "the groups must divide the heads",
        )
        self._check_rotary()
        if self.is_hybrid:
            self._check_gated_delta_net() if kind == "gated_delta_net" else self._check_mamba()
        self._check_moe()
        for name, value, allowed in (
            ("position embedding type", self.position_embedding_type, POSITION_EMBEDDINGS),
            ("normalization", self.normalization, NORMALIZATIONS),
            ("router score function", self.moe_router_score_function, ROUTER_SCORE_FUNCTIONS),
            ("mamba_inner_norm", self.mamba_inner_norm, INNER_NORMS),
        ):
            require(value in allowed, f"{name} {value!r} is unknown; one of {', '.join(allowed)}")
        require(
            not self.apply_layernorm_1p or self.normalization == "RMSNorm",
            f"--apply-layernorm-1p is not supported with --normalization {self.normalization}; RMSNorm would do",
        )
        for name, epsilon in (
            ("--norm-epsilon", self.norm_epsilon),
            ("mamba_inner_norm_epsilon", self.inner_norm_epsilon),
        ):
            require(math.isfinite(epsilon) and epsilon > 0, f"{name} {epsilon} must be more than zero")
        require(
            not (self.squared_relu and self.swiglu),
            "--squared-relu and --swiglu contradict each other; give one of them",
        )

    def _check_pattern(self) -> None:
        pattern = self.hybrid_override_pattern
        require(len(pattern) > 0, "the hybrid pattern is empty; give at least one layer, as in 'M-*-'")
        require(len(pattern) <= MOST_LAYERS, f"{len(pattern)} layers are too many; a model may have {MOST_LAYERS}")
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
        for name, value in self.to_dict().items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            largest = _LARGEST.get(name, LARGEST_SIZE)
            require(value <= largest, f"{flag_of(name)} {_digits(value)} is too large; at most {largest} would do")
            require(value > 0, f"{flag_of(name)} {_digits(value)} must be positive")

    def _check_rotary(self) -> None:
        factor = self.rope_scaling_factor
        require(math.isfinite(factor) and factor >= 1, f"--rope-scaling-factor {factor} must be 1 or more")
        require(
            not self.use_rope_scaling or self.position_embedding_type == "rope",
            f"--use-rope-scaling needs --position-embedding-type rope, not {self.position_embedding_type}",
        )
        share = self.rotary_percent
        require(0 < share <= 1, f"--rotary-percent {share} must be more than 0 and at most 1: it is a share of a head")
        rotated = int(self.head_channels * share)
        require(
            self.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0),
            f"--rotary-percent {share} of an attention head of {self.head_channels} rotates {rotated} channels; "
            "rotary embeddings need an even number",
        )

    def _check_mamba(self) -> None:
        heads, groups = self.mamba_heads, self.mamba_num_groups
        require(self.mamba_conv_kernel >= 2, f"Mamba convolution window {self.mamba_conv_kernel} must be at least 2")
        if self.recurrent_layer == "mamba1":
            return
        require(
            heads > 0 and heads % groups == 0,
            f"{heads} Mamba heads cannot be shared by {groups} Mamba groups; the groups must divide the heads "
            "(--mamba-num-heads, --mamba-num-groups)",
        )

    def _check_gated_delta_net(self) -> None:
        keys, values, window = self.linear_num_key_heads, self.linear_num_value_heads, self.linear_conv_kernel_dim
        require(
            values % keys == 0,
            f"--linear-num-key-heads {keys} cannot be shared evenly by --linear-num-value-heads {values}; the former "
            "must divide the latter",
        )
        require(window >= 2, f"--linear-conv-kernel-dim {window} must be at least 2")

    def _check_moe(self) -> None:
        pattern, experts, chosen = self.hybrid_override_pattern, self.num_experts, self.moe_router_topk
        if not self.is_moe:
            require(
                experts is None,
                f"--num-experts {experts} is for MoE layers, and pattern {pattern!r} has none; put an E into it",
            )
            return
        require(experts is not None, f"pattern {pattern!r} has MoE layers (E), which need --num-experts")
        layers, most = pattern.count("E"), MOST_EXPERTS // pattern.count("E")
        require(
            experts <= most,
            f"--num-experts {experts} in each of {layers} layers are too many; at most {most} would do",
        )
        require(
            chosen <= experts,
            f"--moe-router-topk {chosen} experts of --num-experts {experts} cannot be chosen; give at most {experts}",
        )
        require(
            self.disable_bias_linear,
            f"pattern {pattern!r} has MoE layers (E), which have no biases; leave --no-disable-bias-linear out",
        )
        require(
            not self.moe_shared_expert_gate or self.moe_shared_expert_intermediate_size is not None,
            "--moe-shared-expert-gate is for shared experts; give --moe-shared-expert-intermediate-size too",
        )
        scale = self.moe_router_topk_scaling_factor
        require(
            scale is None or (math.isfinite(scale) and scale > 0),
            f"--moe-router-topk-scaling-factor {scale} must be more than zero",
        )
        self._check_router_scores()
        self._check_router_groups()

    def _check_router_scores(self) -> None:
        if self.moe_router_score_function != "softmax":
            require(not self.moe_router_pre_softmax, "--moe-router-pre-softmax needs softmax scores")
            return
        use_sigmoid = "give --moe-router-score-function sigmoid"
        require(not self.moe_router_enable_expert_bias, f"--moe-router-enable-expert-bias needs sigmoid; {use_sigmoid}")
        require(
            self.moe_router_topk > 1 or self.moe_router_pre_softmax,
            f"--moe-router-topk 1 gives every expert the softmax weight 1; {use_sigmoid}, or --moe-router-pre-softmax",
        )

    def _check_router_groups(self) -> None:
        groups, open_groups = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None and open_groups is None:
            return
        given = f"--moe-router-num-groups {groups} and --moe-router-group-topk {open_groups}"
        require(groups is not None and open_groups is not None, f"{given}: give both or neither")
        experts, chosen = self.num_experts, self.moe_router_topk
        require(experts % groups == 0, f"{given}: {groups} groups cannot share {experts} experts evenly")
        require(open_groups <= groups, f"{given}: at most {groups} groups can be open")
        require(
            open_groups <= chosen <= open_groups * experts // groups,
            f"{given}: {open_groups} groups of {experts // groups} experts give at least {open_groups} and "
            f"at most {open_groups * experts // groups} experts to a token, not --moe-router-topk {chosen}",
        )

    @property
    def is_moe(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return "E" in self.hybrid_override_pattern

    @property
    def is_hybrid(self) -> bool:
        """Whether any layer carries a recurrent state."""
        return "M" in self.hybrid_override_pattern

    @property
    def scan_chunk_size(self) -> int:
        """Tokens that recurrent layers take together; at inference at most that, see `memory.budget`."""
        return GATED_DELTA_CHUNK if self.recurrent_layer == "gated_delta_net" else self.mamba_chunk_size

    @property
    def layer_count(self) -> int:
        """Layers, of every kind."""
        return len(self.hybrid_override_pattern)

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or (1 if self.group_query_attention else self.num_attention_heads)

    @property
    def head_channels(self) -> int:
        """Size of one attention head (D of query, key and value)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width inside one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba-2 layer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def mamba_channels(self) -> int:
        """Channels of a Mamba-1 layer."""
        return self.mamba_inner_size or 2 * self.hidden_size

    @property
    def dt_rank(self) -> int:
        """Rank of the projection to a Mamba-1 layer's step sizes."""
        return self.mamba_dt_rank or math.ceil(self.hidden_size / 16)

    @property
    def inner_norm_epsilon(self) -> float:
        """Of the norms of dt, B and C in a Mamba-1 layer."""
        return self.norm_epsilon if self.mamba_inner_norm_epsilon is None else self.mamba_inner_norm_epsilon

    def to_dict(self) -> dict:
        """A plain dictionary, as saved with a checkpoint."""
        return dataclasses.asdict(self)


def _digits(value: int) -> str:
    return str(value) if abs(value) < 10**18 else "of more than 18 digits"
