"""Fields of a model's architecture, in the order in which checkpoints store them, and the values of some of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megatron_ext.config.layers import LAYER_SYMBOLS, YARN, is_attention, is_gpt_pattern, is_recurrent
from megatron_ext.config.options import option

NORMALIZATIONS = ("RMSNorm", "LayerNorm")
LEARNED_POSITIONS = "learned_absolute"
POSITION_EMBEDDINGS = ("none", "rope", LEARNED_POSITIONS)
ROUTER_SCORE_FUNCTIONS = ("softmax", "sigmoid")
RECURRENT_LAYERS = ("mamba2", "mamba1", "gated_delta_net", "short_conv")  # by the names of `RECURRENT_KINDS`
SOFTMAX_TYPES = ("vanilla", "learnable")  # learnable: with a sink for each query head
INNER_NORMS = ("none", "plain", "weighted")  # of Mamba-1
GATE_FIRST, NORM_FIRST = "gate_first", "norm_first"  # of Mamba-2
MULTIPLIERS = (
    "embedding_multiplier",
    "logits_multiplier",
    "residual_multiplier",
    "attention_output_multiplier",
    "recurrent_output_multiplier",
    "mlp_output_multiplier",
    "mlp_gate_multiplier",
    "softmax_scale",
)
LLAMA_POSITIONS = 8192  # before `use_rope_scaling`, as in megatron-core
LONGEST_WINDOW = 1024  # tokens of a convolution; far more than any model has
# Fields that stand for another value while they have their default, and the properties with that value.
_RESOLVED = {
    "num_layers": "layer_count",
    "ffn_hidden_size": "ffn_size",
    "num_query_groups": "query_groups",
    "kv_channels": "head_channels",
    "mamba_num_heads": "mamba_heads",
    "mamba_inner_size": "mamba_channels",
    "mamba_dt_rank": "dt_rank",
    "mamba_inner_norm_epsilon": "inner_norm_epsilon",
    "moe_ffn_hidden_size": "expert_ffn_size",
    "mtp_num_layers": "mtp_layer_count",
    "mtp_hybrid_override_pattern": "mtp_pattern",
}


@dataclass(frozen=True)
class ModelFields:
    """All fields of `ModelConfig`, unchecked, and the sizes that follow from them. Defaults: a tiny hybrid.

    Checks and kinds of recurrent layers are written for this class; `ModelConfig` applies them.
    """

    # Width, and the norms before layers
    hidden_size: int = option(256, "Hidden size of the model")
    normalization: str = option(NORMALIZATIONS[0], "Kind of norm", choices=NORMALIZATIONS)
    norm_epsilon: float = option(1e-5, "Epsilon that norms add to the variance", above=0)
    apply_layernorm_1p: bool = option(False, "Multiply by one plus the weight in norms")

    # Recurrent layers: Mamba of either version
    mamba_state_dim: int = option(128, "State size of a Mamba layer")
    mamba_conv_kernel: int = option(4, minimum=2, maximum=LONGEST_WINDOW)
    mamba_chunk_size: int = 128

    # Recurrent layers: Mamba-2
    mamba_head_dim: int = option(64, "Size of one Mamba head")
    mamba_num_heads: int | None = option(None, "Mamba heads; default: 2 * hidden size / head dimension")
    mamba_num_groups: int = option(8, "Groups of Mamba heads that share B and C")
    # After the scan: gate before or after the norm; None: no norm
    mamba_gated_norm: str | None = option(GATE_FIRST, choices=(GATE_FIRST, NORM_FIRST))
    mamba_multipliers: tuple[float, ...] | None = None  # five factors, of z, x, B, C and dt after in_proj; default: 1

    # Recurrent layers: Mamba-1
    mamba_inner_size: int | None = option(None, "Channels of a Mamba-1 layer; default: 2 * hidden size")
    mamba_dt_rank: int | None = option(None, "Rank of a Mamba-1 layer's step sizes; default: hidden size / 16")
    mamba_inner_norm: str = option(INNER_NORMS[0], choices=INNER_NORMS)  # of dt, B and C, without or with weights
    mamba_inner_norm_epsilon: float | None = option(None, above=0)  # default: norm_epsilon

    # Recurrent layers: gated delta net, with megatron-core's names
    linear_key_head_dim: int = option(128, "Channels of a key head of a gated delta net")
    linear_value_head_dim: int = option(128, "Channels of a value head of a gated delta net")
    linear_num_key_heads: int = option(16, "Key heads of a gated delta net")
    linear_num_value_heads: int = option(32, "Value heads of a gated delta net")
    linear_conv_kernel_dim: int = option(
        4, "Convolution window of a gated delta net, in tokens", minimum=2, maximum=LONGEST_WINDOW
    )
    linear_norm_epsilon: float | None = option(None, above=0)  # of the output norm; default: norm_epsilon
    linear_allow_neg_eigval: bool = False  # the delta rule's strength is at most 2, not 1

    # Recurrent layers: short convolution, of `hidden_size` channels
    short_conv_kernel_dim: int = option(
        3, "Window of a short convolution, in tokens", minimum=2, maximum=LONGEST_WINDOW
    )

    # MLPs; `disable_bias_linear` also applies to attention and Mamba layers
    ffn_hidden_size: int | None = option(None, "Intermediate size of an MLP; default: 4 * hidden size")
    squared_relu: bool = option(False, "Use squared ReLU in MLPs")
    swiglu: bool = option(False, "Use SwiGLU in MLPs")
    quick_geglu: bool = option(False, "Use a gate of x * sigmoid(1.702 x) in MLPs")
    activation_func_clamp_value: float | None = option(
        None, "Bound of the inputs of gated MLPs' activations", above=0
    )  # of gated MLPs: above for the gate, both ways for the other part
    glu_linear_offset: float = option(0.0, "Number added to what the gate of an MLP multiplies")
    disable_bias_linear: bool = option(True, "Omit the biases of linear layers")
    add_mlp_bias: bool = False  # with disable_bias_linear: MLPs (-) have biases nevertheless

    # Mixtures of experts
    num_experts: int | None = option(None, "Number of experts of each MoE layer (E)")
    moe_ffn_hidden_size: int | None = option(None, "Intermediate size of an expert; default: the size of an MLP")
    moe_shared_expert_intermediate_size: int | None = option(
        None, "Intermediate size of the shared experts; default: no shared experts"
    )
    moe_shared_expert_gate: bool = option(False, "Gate the shared experts' output with a sigmoid of the layer's input")
    moe_latent_size: int | None = option(
        None, "Size that tokens are projected to before the experts; default: no projection"
    )
    moe_router_topk: int = option(2, "Number of experts that each token is routed to")
    moe_router_score_function: str = option(
        "softmax", "Function that turns router logits into expert weights", choices=ROUTER_SCORE_FUNCTIONS
    )
    moe_router_num_groups: int | None = option(None, "Number of expert groups; needs --moe-router-group-topk")
    moe_router_group_topk: int | None = option(
        None, "Number of groups that a token's experts are chosen from; default: all"
    )
    moe_router_pre_softmax: bool = option(False, "Apply the softmax to all experts instead of the chosen ones only")
    moe_router_topk_scaling_factor: float | None = option(
        None, "Scaling factor of the experts' weights; default: 1", above=0
    )
    moe_router_enable_expert_bias: bool = option(
        False, "Add a bias to each expert's score for the choice, not for its weight; needs sigmoid"
    )

    # Attention
    num_attention_heads: int = option(4, "Number of query heads of an attention layer")
    group_query_attention: bool = option(
        False, "Use grouped-query attention; one group unless --num-query-groups is given"
    )
    num_query_groups: int | None = option(None, "Number of key/value heads; default: one for each query head")
    kv_channels: int | None = option(None, "Size of an attention head; default: hidden size / attention heads")
    qk_layernorm: bool = option(False, "Normalize each query and key head before the rotary embedding")
    qk_layernorm_over_heads: bool = False  # over the channels of all heads together instead
    attention_output_gate: bool = option(False, "Gate attention outputs with a sigmoid of the layer's input")
    add_qkv_bias: bool = option(
        False, "Add biases to queries, keys and values"
    )  # with disable_bias_linear: queries, keys and values have biases nevertheless
    add_attention_output_bias: bool = False  # attention's output projection too; needs add_qkv_bias
    softmax_type: str = option(
        SOFTMAX_TYPES[0], "learnable: attention with a learned sink for each query head", choices=SOFTMAX_TYPES
    )
    attention_window: int | None = option(
        None, "Number of tokens that a query of a layer W attends to, its own included"
    )

    # Position embeddings, which rotate attention heads or are added to the token embeddings
    position_embedding_type: str = option(
        "none",
        "Kind of position embedding; yarn is rope with stretched wavelengths",
        choices=(*POSITION_EMBEDDINGS, YARN),
    )
    rotary_base: int = option(10000, "Base of the rotary wavelengths, with rope", maximum=2**53)
    rotary_percent: float = option(
        1.0, "Fraction of each attention head that is rotated, with rope", above=0, maximum=1
    )
    use_rope_scaling: bool = option(False, "Stretch the long rotary wavelengths as Llama 3.1 does")
    rope_scaling_factor: float = option(8.0, "Factor by which --use-rope-scaling stretches them", minimum=1)
    # YaRN: wavelengths with many turns within the original length stay, those with few turns are stretched.
    yarn_rotary_scaling_factor: float | None = option(
        None, "Factor by which yarn stretches wavelengths; default: 1", flag="--rotary-scaling-factor", minimum=1
    )
    yarn_original_max_position_embeddings: int = option(4096, "Maximum length of the model before yarn stretched it")
    yarn_beta_fast: float = option(32.0, "Turns within that length at and above which yarn keeps a wavelength")
    yarn_beta_slow: float = option(1.0, "Turns up to which yarn stretches a wavelength by the whole factor")
    yarn_mscale: float = option(1.0, "Scale of yarn's factor of queries and keys", flag="--mscale")
    yarn_mscale_all_dim: float = option(0.0, "Scale of the divisor of that factor", flag="--mscale-all-dim")
    yarn_correction_range_round_to_int: bool = option(True, "Round yarn's range of wavelengths to pairs of channels")
    max_position_embeddings: int = option(4096, "Maximum sequence length of the model in tokens")

    # Multipliers of activations, not weights: scaling rounds 16-bit weights, and each use of tied ones has its own
    embedding_multiplier: float = option(1.0, above=0)
    logits_multiplier: float = option(1.0, above=0)
    residual_multiplier: float = option(1.0, above=0)  # of every layer's output
    attention_output_multiplier: float = option(1.0, above=0)  # of attention's output, in addition
    recurrent_output_multiplier: float = option(1.0, above=0)
    mlp_output_multiplier: float = option(1.0, above=0)  # experts too
    mlp_gate_multiplier: float = option(1.0, above=0)  # before the activation of a gated MLP
    softmax_scale: float | None = option(None, above=0)  # of queries times keys; default: 1 / sqrt(head channels)

    # The stack, its vocabulary and its spec
    hybrid_override_pattern: str = option(
        "M-M*M-M-",
        "One letter per layer: " + ", ".join(f"{symbol} {name}" for symbol, name in LAYER_SYMBOLS.items()),
        aliases=("--hybrid-layer-pattern",),
        metavar="PATTERN",
    )
    recurrent_layer: str = option(
        "mamba2", "Kind of recurrent layer that M stands for in the pattern", choices=RECURRENT_LAYERS
    )
    num_layers: int | None = option(None, "Number of layers; default: the length of the pattern")
    untie_embeddings_and_output_weights: bool = option(False, "Give the output layer weights of its own")
    vocab_size: int | None = option(None, "Size of the vocabulary; default: the tokenizer's")
    spec: tuple[str, str] | None = option(
        None, "Module and name of a layer spec; default: this package's spec", metavar=("MODULE", "NAME")
    )

    # Multi-token prediction, with megatron-core's names
    mtp_num_layers: int | None = option(None, "Depths of multi-token prediction; default: none")
    mtp_use_repeated_layer: bool = option(False, "Use one layer of multi-token prediction for all depths")
    mtp_hybrid_override_pattern: str | None = option(
        None, "Pattern of a layer of multi-token prediction; default: the last layer of a GPT"
    )

    # Layers

    @property
    def layer_count(self) -> int:
        """Number of layers of all kinds."""
        return len(self.hybrid_override_pattern)

    @property
    def is_moe(self) -> bool:
        """True if any layer is a mixture of experts."""
        return "E" in self.hybrid_override_pattern + self.mtp_pattern

    @property
    def is_hybrid(self) -> bool:
        """True if any layer carries a recurrent state."""
        return any(map(is_recurrent, self.hybrid_override_pattern))

    # Multi-token prediction

    @property
    def mtp_pattern(self) -> str:
        """Letters of one layer of multi-token prediction; empty without any."""
        if self.mtp_num_layers is None:
            return ""
        if self.mtp_hybrid_override_pattern is not None:
            return self.mtp_hybrid_override_pattern
        return self.hybrid_override_pattern[-2:] if is_gpt_pattern(self.hybrid_override_pattern) else ""

    @property
    def mtp_layer_count(self) -> int:
        """Layers of multi-token prediction that have weights of their own."""
        return 1 if self.mtp_num_layers and self.mtp_use_repeated_layer else self.mtp_num_layers or 0

    # Recurrent layers

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
        """Epsilon of the norms of dt, B and C in a Mamba-1 layer."""
        return self.norm_epsilon if self.mamba_inner_norm_epsilon is None else self.mamba_inner_norm_epsilon

    # MLPs, experts and attention

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def is_gated(self) -> bool:
        """True if MLPs and experts have a gate."""
        return self.swiglu or self.quick_geglu

    @property
    def expert_ffn_size(self) -> int:
        """Inner width of one routed expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or (1 if self.group_query_attention else self.num_attention_heads)

    @property
    def head_channels(self) -> int:
        """Size of one attention head (D of query, key and value)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_magnitude(self) -> float:
        """Additional factor of rotated queries and keys (YaRN, arXiv 2309.00071, section 3.4)."""
        factor = self.yarn_rotary_scaling_factor
        if factor is None or factor <= 1:
            return 1.0
        numerator, denominator = (
            0.1 * scale * math.log(factor) + 1.0 for scale in (self.yarn_mscale, self.yarn_mscale_all_dim)
        )
        return numerator / denominator if denominator else math.nan

    @property
    def positions(self) -> int | None:
        """Positions that the model has, with the scaling of rotary wavelengths; None if no layer depends on them."""
        if self.position_embedding_type == LEARNED_POSITIONS:
            return self.max_position_embeddings
        if self.position_embedding_type == "none" or not any(map(is_attention, self.hybrid_override_pattern)):
            return None
        scaled = LLAMA_POSITIONS * self.rope_scaling_factor if self.use_rope_scaling else 0.0
        if self.yarn_rotary_scaling_factor is not None:
            scaled = self.yarn_original_max_position_embeddings * self.yarn_rotary_scaling_factor
        return max(self.max_position_embeddings, int(scaled))

    def to_dict(self) -> dict[str, object]:
        """Return the fields as a plain dictionary, as saved with a checkpoint."""
        return dataclasses.asdict(self)

    def resolved(self) -> dict[str, object]:
        """Return the fields with the values that defaults stand for: equal models have equal ones."""
        return {
            **self.to_dict(),
            **{name: getattr(self, known) for name, known in _RESOLVED.items()},
            "group_query_attention": self.query_groups < self.num_attention_heads,
            "moe_router_topk_scaling_factor": self.moe_router_topk_scaling_factor or 1.0,
            "mtp_use_repeated_layer": self.mtp_layer_count == 1,  # one layer serves every depth
        }
