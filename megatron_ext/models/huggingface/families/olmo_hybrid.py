"""OLMo hybrid checkpoints of Hugging Face.

A decoder layer of theirs is two letters of the pattern: a gated delta net and an MLP ("M-"), each with a norm before
it, or attention and an MLP with norms after them ("AF"). Notes:

- Queries and keys are normed over all heads together.
- A gated delta net overwrites with a strength of up to 2 (`linear_allow_neg_eigval`), and the epsilon of its output
  norm is 1e-5 regardless of `rms_norm_eps`.
- A null rotary base means no positions; an absent one means 10,000.
- Files store the convolution in three parts, which transformers splits evenly, regardless of the sizes of queries, keys
  and values; norms have the authors' names or transformers'.
"""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import (
    SHARE,
    attention_heads,
    rotary_fields,
    rotated_head_size,
)
from megatron_ext.models.huggingface.families.decoders import DECODER_FIELDS, MLP_TENSORS
from megatron_ext.models.huggingface.families.qwen_hybrids import (
    DELTA_NET_SIZES,
    delta_net_or_attention,
    stacked_inputs,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import (
    Fields,
    FieldTable,
    check_divides,
    flag,
    size,
    size_or,
)
from megatron_ext.models.huggingface.tensors import (
    MLP,
    RECURRENT_NORM,
    Joined,
    TensorTable,
    attention,
    copied,
    gated_mlp,
    query_and_key_norms,
    weights,
)

_LAYERS = {"M": "M-", "*": "AF"}
_OUT_NORM_EPSILON = 1e-5
_ALLOWS_NEGATIVE = "linear_allow_neg_eigval"

_FIELDS = DECODER_FIELDS | FieldTable(
    fixed={"attention_bias": (False,), "linear_use_gate": (True,), "sliding_window": (None,), SHARE: (1.0, None)},
    read=frozenset(("layer_types", _ALLOWS_NEGATIVE, *DELTA_NET_SIZES)),
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
    },
)

_INPUTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"}
_TENSORS = TensorTable(
    layers={
        "M": {
            **weights({RECURRENT_NORM: "input_layernorm"}),
            **copied("mixer", "linear_attn", ("A_log", "dt_bias", "conv1d.weight")),
            **weights({"mixer.out_norm": "linear_attn.o_norm", "mixer.out_proj": "linear_attn.o_proj"}),
            "mixer.in_proj.weight": stacked_inputs(
                {f"linear_attn.{name}.weight": held for name, held in _INPUTS.items()}
            ),
        },
        "-": MLP_TENSORS,
        "A": {
            **weights({"self_attention.output_norm.norm": "post_attention_layernorm"}),
            **attention("self_attn"),
            **query_and_key_norms("self_attn"),
        },
        "F": {**weights({"mlp.output_norm.norm": "post_feedforward_layernorm"}), **gated_mlp(MLP, "mlp")},
    },
    letters_per_layer=2,
    joined=(
        Joined(
            r"(.*\.linear_attn)\.[qkv]_conv1d\.weight",
            r"\1.conv1d.weight",
            tuple(rf"\1.{one}_conv1d.weight" for one in "qkv"),
        ),
    ),
    other_names={
        r"(layers\.\d+)\.attention_layer_norm\.weight": r"\1.input_layernorm.weight",
        r"(layers\.\d+)\.feedforward_layer_norm\.weight": r"\1.post_attention_layernorm.weight",
    },
)


def _pattern(fields: Fields) -> str:
    mixers = delta_net_or_attention(fields)
    if fields.get("layer_types") is None and "*" not in mixers:
        mixers = mixers[:-1] + "*"  # as in transformers: at least one layer is attention
    return "".join(_LAYERS[mixer] for mixer in mixers)


def _delta_net_sizes(fields: Fields) -> dict[str, int]:
    """Return the sizes; defaults: attention's heads, keys of 3/4 of the hidden size in all, values twice as wide."""
    heads = size(fields, "num_attention_heads")
    key_heads = size_or(fields, "linear_num_key_heads", heads)
    key_size = size_or(fields, "linear_key_head_dim", 3 * size(fields, "hidden_size") // (4 * key_heads))
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": size_or(fields, "linear_num_value_heads", heads),
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": size_or(fields, "linear_value_head_dim", 2 * key_size),
        "linear_conv_kernel_dim": size_or(fields, "linear_conv_kernel_dim", 4),
    }
    check_divides(sizes, "linear_num_key_heads", "linear_num_value_heads")
    return sizes


def _positions(fields: Fields) -> Fields:
    """Return the rotary embedding fields, or none if the base is null."""
    rotary = rotary_fields(fields)
    rope = fields.get("rope_parameters")
    where = rope if isinstance(rope, dict) else fields
    if where.get("rope_theta", 0) is not None:
        return rotary
    if fields.get("rope_theta") is not None or fields.get("rope_scaling") is not None:
        raise ConfigError(
            "config.json: rope_parameters.rope_theta = None contradicts rope_theta and rope_scaling; give one of them"
        )
    return {"position_embedding_type": "none"}


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    constants={
        "recurrent_layer": "gated_delta_net",
        "linear_norm_epsilon": _OUT_NORM_EPSILON,
        "qk_layernorm": True,
        "qk_layernorm_over_heads": True,
        "swiglu": True,
    },
    derived=(
        attention_heads,
        rotated_head_size,
        _positions,
        _delta_net_sizes,
        lambda fields: {_ALLOWS_NEGATIVE: flag(fields, _ALLOWS_NEGATIVE, default=True)},
    ),
)
