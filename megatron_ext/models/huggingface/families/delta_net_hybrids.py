"""Hybrids of attention and gated delta nets: Qwen3-Next, Qwen3.5, the latter's mixtures of experts, and OLMo hybrid.

A decoder layer of Qwen's is two letters of the pattern: a gated delta net (M) or attention (*), then an MLP (-) or
experts (E), each with its norm and its residual. Qwen's norms multiply by 1 + weight on both sides
(`apply_layernorm_1p`), except those inside the gated delta net. Its layer of multi-token prediction (`mtp.`), which
transformers skips, is one decoder layer with attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.config.recurrent import GATED_DELTA_NET
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import (
    ROPE_FIELDS,
    SHARE,
    attention_heads,
    rotary_fields,
    rotated_head_size,
)
from megatron_ext.models.huggingface.families.decoders import (
    DECODER_FIELDS,
    FEED_FORWARD_NORM,
    MLP_TENSORS,
    NORMED_ATTENTION_TENSORS,
    all_of,
    decoder_pattern,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import (
    ATTENTION_SIZES,
    DECODER_SIZES,
    SILU,
    Fields,
    FieldTable,
    Values,
    names,
)
from megatron_ext.models.huggingface.moe import SPARSE_FIELDS, softmax_experts, sparse_letters
from megatron_ext.models.huggingface.tensors import (
    EXPERT,
    ROUTED_EXPERT,
    Conversion,
    Joined,
    LayerTable,
    Source,
    TensorTable,
    attention,
    copied,
    gated_mlp,
    plain_mlp,
    query_and_key_norms,
    weights,
)

DELTA_NET_SIZES = {name: name for name in GATED_DELTA_NET.layout}  # the same names in `config.json`
_KINDS = {"linear_attention": "M", "full_attention": "*"}
_PREDICTION = {
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj.weight": "mtp.fc.weight",
    "final_layernorm.weight": "mtp.norm.weight",
}
# transformers' defaults of absent fields.
_DEFAULT_ATTENTION_INTERVAL = 4
_DEFAULT_ROTARY_SHARE = 0.25
_DEFAULT_HEAD_SIZE = 256


def delta_net_or_attention(fields: Fields) -> str:
    """Return the letter of each layer: M for a gated delta net, * for attention.

    `layer_types` lists the layers; without it every `full_attention_interval`-th layer is attention.
    """
    if fields.get("layer_types") is not None:
        return fields.layer_letters("layer_types", _KINDS)
    interval = fields.size("full_attention_interval", _DEFAULT_ATTENTION_INTERVAL)
    return "".join("M" if (index + 1) % interval else "*" for index in range(fields.layer_count))


def _channels(config: ModelConfig) -> tuple[int, int, int]:
    """Return the channels of all queries (equal to all keys), of all values, and the number of value heads."""
    heads = config.linear_num_value_heads
    return config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim, heads


def stacked_inputs(parts: Mapping[str, str]) -> Source:
    """Source of an input projection whose parts of unequal heights are concatenated by rows in ours.

    Args:
        parts: Names of the projections, in order -> contents: q, k, v, z (the gate), b (beta) and a (alpha).
    """
    assert "".join(parts.values()) == "qkvzba", parts

    def rows(config: ModelConfig) -> list[int]:
        keys, values, heads = _channels(config)
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
        return [sum(sizes[one] for one in held) for held in parts.values()]

    return Source(tuple(f"linear_attn.{name}.weight" for name in parts), Conversion(rows))


def _input_rows(config: ModelConfig) -> Sequence[int]:
    keys, values, heads = _channels(config)
    return 2 * (keys + values), 2 * heads


def _input_projection(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Regroup rows [q k v z] by key head, and [beta alpha] by key head -> all of q, of k, of v, of z, beta, alpha."""
    qkvz, ba = (part.unflatten(0, (config.linear_num_key_heads, -1)) for part in parts)  # [key heads, rows, h]
    shared = config.linear_num_value_heads // config.linear_num_key_heads
    keys, values = config.linear_key_head_dim, shared * config.linear_value_head_dim
    sections = [*qkvz.split([keys, keys, values, values], dim=1), *ba.split([shared, shared], dim=1)]
    return torch.cat([section.flatten(0, 1) for section in sections])


def _separate_input(ours: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    """Regroup all of q, of k, of v, of z, beta, alpha -> rows [q k v z] by key head, and [beta alpha] by key head."""
    keys, values, heads = _channels(config)
    parts = ours.split([keys, keys, values, values, heads, heads])
    by_head = [part.unflatten(0, (config.linear_num_key_heads, -1)) for part in parts]  # [key heads, rows, h]
    return torch.cat(by_head[:4], dim=1).flatten(0, 1), torch.cat(by_head[4:], dim=1).flatten(0, 1)


def _mixer_tensors(input_projection: Source) -> LayerTable:
    """Tensor table of a gated delta net; its output norm multiplies by the weight in theirs, by 1 + weight in ours."""
    around_one = Conversion(
        lambda config: [config.linear_value_head_dim],
        lambda parts, _: parts[0].float() - 1.0,
        lambda ours, _: [ours.float() + 1.0],
    )
    return {
        **weights({"norm": "input_layernorm"}),
        **copied("mixer", "linear_attn", "A_log dt_bias conv1d.weight out_proj.weight"),
        "mixer.in_proj.weight": input_projection,
        "mixer.out_norm.weight": Source(("linear_attn.norm.weight",), around_one),
    }


_FIELDS = FieldTable(
    sizes={**ATTENTION_SIZES, **DELTA_NET_SIZES, "num_key_value_heads": "num_query_groups"},
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-6)},
    fixed={
        "attention_bias": (False,),
        "hidden_act": SILU,
        "sliding_window": (None,),
        "use_sliding_window": (False,),
    },
    read=names(f"head_dim layer_types full_attention_interval {SHARE}") | ROPE_FIELDS,
)
_EXPERT_FIELDS = names("num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size")
_ROUTER_AND_SHARED_EXPERT = {
    **FEED_FORWARD_NORM,
    **weights({"mlp.router": "mlp.gate"}),
    **gated_mlp("mlp.shared_experts", "mlp.shared_expert"),
    "mlp.shared_experts.gate_weight": Source(("mlp.shared_expert_gate.weight",)),
}


def _attention(fields: Fields) -> Values:
    fields.check_divides("linear_num_key_heads", "linear_num_value_heads")
    return {
        **attention_heads(fields),
        "kv_channels": fields.size("head_dim", _DEFAULT_HEAD_SIZE),
        **rotary_fields(fields, default_share=_DEFAULT_ROTARY_SHARE),
    }


def _experts(fields: Fields, *, is_normalized: bool = True) -> Values:
    return {
        **softmax_experts(fields, "num_experts", "moe_intermediate_size", is_normalized=is_normalized),
        "moe_shared_expert_intermediate_size": fields.size("shared_expert_intermediate_size"),
        "moe_shared_expert_gate": True,
    }


# Qwen3-Next. Theirs store the input projection of a gated delta net in two matrices whose rows are grouped by key head;
# ours in one, [q | k | v | gate | beta | alpha], see `_input_projection`. Both route by a softmax, over the chosen
# experts if `norm_topk_prob` is true, over all of them otherwise.
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    fields=_FIELDS
    | FieldTable(
        sizes=DECODER_SIZES,
        read=_EXPERT_FIELDS | SPARSE_FIELDS | {"norm_topk_prob"},
    ),
    pattern=decoder_pattern(delta_net_or_attention, sparse_letters),
    tensors=TensorTable(
        layers={
            "M": _mixer_tensors(
                Source(
                    ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"),
                    Conversion(_input_rows, _input_projection, _separate_input),
                )
            ),
            "*": NORMED_ATTENTION_TENSORS,
            "-": MLP_TENSORS,
            "E": {**_ROUTER_AND_SHARED_EXPERT, **gated_mlp(ROUTED_EXPERT, f"mlp.experts.{EXPERT}")},
        },
        ignored=r"mtp\..*",
        prediction=_PREDICTION,
    ),
    constants={
        "recurrent_layer": "gated_delta_net",
        "qk_layernorm": True,
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
        "swiglu": True,
    },
    derived=(_attention,),
    experts=lambda fields: _experts(fields, is_normalized=fields.flag("norm_topk_prob", default=True)),
    prediction=lambda fields: "*E" if "E" in sparse_letters(fields) else "*-",
)

# Qwen3.5: text models, and the text part of models that also read images. A text token has the same position on every
# axis of their rotary embedding, so the split of channels between the axes (`mrope_section`, `mrope_interleaved`)
# changes nothing. Vision tensors (`visual.`) are skipped, as in transformers' text model.
_AXES = names("mrope_section mrope_interleaved")
_TEXT, _TIED = "text_config", "tie_word_embeddings"
_INPUTS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}

_TEXT_FIELDS = _FIELDS | FieldTable(
    fixed={"attn_output_gate": (True,), "mlp_only_layers": ((), None)},
    read=names("mtp_num_hidden_layers mtp_use_dedicated_embeddings num_nextn_predict_layers"),
    defaults={
        "max_position_embeddings": 32768,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    },
)


def _without_axes(fields: Fields) -> Fields:
    """Return the fields without the settings of several rotary axes."""
    objects = {name: given for name in ROPE_FIELDS if isinstance(given := fields.get(name), dict)}
    replaced = {
        name: {key: value for key, value in given.items() if key not in _AXES} for name, given in objects.items()
    }
    return Fields({**fields, **replaced})


def _text_fields(raw: Values, model_type: str) -> Values:
    """Return the fields of the text model of this type; the top level decides whether embeddings are tied.

    Raises:
        ConfigError: There is no text model, or the two levels contradict each other.
    """
    given = raw.get(_TEXT)
    if not isinstance(given, dict):
        Fields(raw).refuse(_TEXT, "it must be an object")
    text = Fields(given)
    kind = text.get("model_type", model_type)
    if kind != model_type:
        raise ConfigError(f"config.json: {_TEXT}.model_type = {kind!r} is not supported; supported is {model_type!r}")
    inside = text.flag(_TIED, default=False)
    whole = Fields(raw).flag(_TIED, default=inside)
    if _TIED in text and inside != whole:
        raise ConfigError(f"config.json: {_TEXT}.{_TIED} = {inside} contradicts {_TIED} = {whole}")
    return {**text, _TIED: whole}


QWEN3_5_TEXT = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=_TEXT_FIELDS | FieldTable(sizes=DECODER_SIZES),
    pattern=decoder_pattern(delta_net_or_attention),
    tensors=TensorTable(
        layers={
            "M": _mixer_tensors(stacked_inputs(_INPUTS)),
            "*": NORMED_ATTENTION_TENSORS,
            "-": MLP_TENSORS,
        },
        prefixes=("model.language_model.", "model."),
        ignored=r"(mtp|visual)\..*",
        prediction=_PREDICTION,
    ),
    derived=(lambda fields: _attention(_without_axes(fields)),),
    prediction=lambda _: "*-",
)
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    text=lambda raw: _text_fields(raw, QWEN3_5_TEXT.model_type),
)

# Qwen3.5 with experts and a gated shared one (E) in every layer, weighted by a softmax over the chosen ones. Files
# store each expert's gate and up projection separately, or all experts of a layer in one tensor, gate above up.
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=_TEXT_FIELDS
    | FieldTable(
        read=_EXPERT_FIELDS | {"intermediate_size"},  # no layer is a plain MLP
        defaults={
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
    ),
    pattern=decoder_pattern(delta_net_or_attention, all_of("E")),
    tensors=replace(
        QWEN3_5_TEXT.tensors,
        layers={
            **QWEN3_5_TEXT.tensors.layers,
            "E": {**_ROUTER_AND_SHARED_EXPERT, **plain_mlp(ROUTED_EXPERT, f"mlp.experts.{EXPERT}", "gate_up_proj")},
        },
        split={r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)": r"\1.{index}.\2.weight"},
        joined=(Joined(r".*\.mlp\.experts\.\d+", "gate_up_proj.weight", ("gate_proj.weight", "up_proj.weight")),),
    ),
    experts=_experts,
    prediction=lambda _: "*E",
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    text=lambda raw: _text_fields(raw, QWEN3_5_MOE_TEXT.model_type),
)

# OLMo hybrid. A decoder layer of theirs is a gated delta net and an MLP ("M-"), each with a norm before it, or
# attention and an MLP with norms after them ("AF"). Notes:
# - Queries and keys are normed over all heads together.
# - A gated delta net overwrites with a strength of up to 2 (`linear_allow_neg_eigval`), and the epsilon of its output
#   norm is 1e-5 regardless of `rms_norm_eps`.
# - A null rotary base means no positions; an absent one means 10,000.
# - Files store the convolution in three parts, which transformers splits evenly, regardless of the sizes of queries,
#   keys and values; norms have the authors' names or transformers'.
_OLMO_LAYERS = {"M": "M-", "*": "AF"}
_ALLOWS_NEGATIVE = "linear_allow_neg_eigval"

_OLMO_FIELDS = DECODER_FIELDS | FieldTable(
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

_OLMO_INPUTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"}
_OLMO_TENSORS = TensorTable(
    layers={
        "M": {
            **weights({"norm": "input_layernorm"}),
            **copied("mixer", "linear_attn", "A_log dt_bias conv1d.weight"),
            **weights({"mixer.out_norm": "linear_attn.o_norm", "mixer.out_proj": "linear_attn.o_proj"}),
            "mixer.in_proj.weight": stacked_inputs(_OLMO_INPUTS),
        },
        "-": MLP_TENSORS,
        "A": {
            **weights({"self_attention.output_norm.norm": "post_attention_layernorm"}),
            **attention("self_attn"),
            **query_and_key_norms("self_attn"),
        },
        "F": {**weights({"mlp.output_norm.norm": "post_feedforward_layernorm"}), **gated_mlp("mlp", "mlp")},
    },
    joined=(Joined(r".*\.linear_attn", "conv1d.weight", tuple(f"{one}_conv1d.weight" for one in "qkv")),),
    other_names={
        r"(layers\.\d+)\.attention_layer_norm\.weight": r"\1.input_layernorm.weight",
        r"(layers\.\d+)\.feedforward_layer_norm\.weight": r"\1.post_attention_layernorm.weight",
    },
)


def _olmo_pattern(fields: Fields) -> str:
    mixers = delta_net_or_attention(fields)
    if fields.get("layer_types") is None and "*" not in mixers:
        mixers = mixers[:-1] + "*"  # as in transformers: at least one layer is attention
    return "".join(_OLMO_LAYERS[mixer] for mixer in mixers)


def _olmo_sizes(fields: Fields) -> Values:
    """Return the sizes; defaults: attention's heads, keys of 3/4 of the hidden size in all, values twice as wide."""
    heads = fields.size("num_attention_heads")
    key_heads = fields.size("linear_num_key_heads", heads)
    key_size = fields.size("linear_key_head_dim", 3 * fields.size("hidden_size") // (4 * key_heads))
    sizes = Fields(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=fields.size("linear_num_value_heads", heads),
        linear_key_head_dim=key_size,
        linear_value_head_dim=fields.size("linear_value_head_dim", 2 * key_size),
        linear_conv_kernel_dim=fields.size("linear_conv_kernel_dim", 4),
    )
    sizes.check_divides("linear_num_key_heads", "linear_num_value_heads")
    return sizes


def _olmo_positions(fields: Fields) -> Values:
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
    fields=_OLMO_FIELDS,
    pattern=_olmo_pattern,
    tensors=_OLMO_TENSORS,
    constants={
        "recurrent_layer": "gated_delta_net",
        "linear_norm_epsilon": 1e-5,
        "qk_layernorm": True,
        "qk_layernorm_over_heads": True,
        "swiglu": True,
    },
    derived=(
        attention_heads,
        rotated_head_size,
        _olmo_positions,
        _olmo_sizes,
        lambda fields: {_ALLOWS_NEGATIVE: fields.flag(_ALLOWS_NEGATIVE, default=True)},
    ),
)

FAMILIES = (QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5, QWEN3_5_MOE_TEXT, QWEN3_5_MOE, OLMO_HYBRID)
