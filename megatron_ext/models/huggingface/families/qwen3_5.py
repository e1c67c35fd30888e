"""Qwen3.5 checkpoints of Hugging Face: text models, and the text part of models that also read images.

A decoder layer of theirs is two letters of the pattern: a gated delta net (M) or attention (*), then an MLP (-), each
with its norm and its residual. Norms multiply by 1 + weight on both sides (`apply_layernorm_1p`), except theirs inside
the gated delta net. A text token has the same position on every axis of their rotary embedding, so the split of
channels between the axes (`mrope_section`, `mrope_interleaved`) changes nothing.

Skipped, as in transformers' text model: vision tensors (`visual.`). The layer of multi-token prediction (`mtp.`), which
transformers skips, too, is one decoder layer with attention.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import attention_heads
from megatron_ext.models.huggingface.blocks import (
    ATTENTION_NORM,
    MLP,
    MLP_NORM,
    RECURRENT_NORM,
    attention,
    copied,
    gated_mlp,
    query_and_key_norms,
    weights,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import (
    Fields,
    check_divides,
    flag,
    names,
    size_or,
)
from megatron_ext.models.huggingface.gated_delta_net import (
    DELTA_NET_SIZES,
    QWEN_PREDICTION,
    delta_net_or_attention,
    norm_around_one,
    stacked_inputs,
)
from megatron_ext.models.huggingface.rotary_fields import ROPE_FIELDS, SHARE, rotary_fields
from megatron_ext.models.huggingface.tensors import TensorTable

_DEFAULT_ROTARY_SHARE = 0.25
_DEFAULT_HEAD_SIZE = 256
_AXES = names("mrope_section mrope_interleaved")
_TEXT, _TIED = "text_config", "tie_word_embeddings"

_FIELDS = FieldTable(
    sizes={**DECODER_SIZES, **DELTA_NET_SIZES, "num_key_value_heads": "num_query_groups"},
    numbers={"rms_norm_eps": ("norm_epsilon", 1e-6)},
    fixed={
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "hidden_act": SILU,
        "mlp_only_layers": ((), None),
        "sliding_window": (None,),
        "use_sliding_window": (False,),
    },
    read=names(
        """
        head_dim layer_types full_attention_interval mtp_num_hidden_layers mtp_use_dedicated_embeddings
        num_nextn_predict_layers
        """
    )
    | ROPE_FIELDS
    | {SHARE},
    defaults={
        "max_position_embeddings": 32768,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    },
)

_MIXER_NORM, _FEED_FORWARD_NORM = "input_layernorm", "post_attention_layernorm"
_INPUTS = {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}
_TENSORS = TensorTable(
    layers={
        "M": {
            **weights({RECURRENT_NORM: _MIXER_NORM}),
            **copied("mixer", "linear_attn", ("A_log", "dt_bias", "conv1d.weight", "out_proj.weight")),
            "mixer.in_proj.weight": stacked_inputs(
                {f"linear_attn.{name}.weight": held for name, held in _INPUTS.items()}
            ),
            "mixer.out_norm.weight": norm_around_one("linear_attn.norm.weight"),
        },
        "*": {
            **weights({ATTENTION_NORM: _MIXER_NORM}),
            **attention("self_attn"),
            **query_and_key_norms("self_attn"),
        },
        "-": {**weights({MLP_NORM: _FEED_FORWARD_NORM}), **gated_mlp(MLP, "mlp")},
    },
    letters_per_layer=2,
    prefixes=("model.language_model.", "model."),
    ignored=r"(mtp|visual)\..*",
    prediction=QWEN_PREDICTION,
)


def _derived(fields: Fields) -> Fields:
    check_divides(fields, "linear_num_key_heads", "linear_num_value_heads")
    return {
        **attention_heads(fields),
        "kv_channels": size_or(fields, "head_dim", _DEFAULT_HEAD_SIZE),
        **rotary_fields(_without_axes(fields), default_share=_DEFAULT_ROTARY_SHARE),
    }


def _without_axes(fields: Fields) -> Fields:
    """Return the fields without the settings of several rotary axes."""
    objects = {name: fields[name] for name in ROPE_FIELDS if isinstance(fields.get(name), dict)}
    replaced = {
        name: {key: value for key, value in given.items() if key not in _AXES}
        for name, given in objects.items()
        if isinstance(given, dict)
    }
    return {**fields, **replaced}


def text_fields(raw: Fields, model_type: str) -> Fields:
    """Return the fields of the text model of this type; the top level decides whether embeddings are tied.

    Raises:
        ConfigError: There is no text model, or the two levels contradict each other.
    """
    text = raw.get(_TEXT)
    if not isinstance(text, dict):
        raise ConfigError(f"config.json: {_TEXT} = {text!r} is not supported; it must be an object")
    kind = text.get("model_type", model_type)
    if kind != model_type:
        raise ConfigError(f"config.json: {_TEXT}.model_type = {kind!r} is not supported; supported is {model_type!r}")
    inside = flag(text, _TIED, default=False)
    whole = flag(raw, _TIED, default=inside)
    if _TIED in text and inside != whole:
        raise ConfigError(f"config.json: {_TEXT}.{_TIED} = {inside} contradicts {_TIED} = {whole}")
    return {**text, _TIED: whole}


QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    fields=_FIELDS,
    pattern=lambda fields: "".join(f"{mixer}-" for mixer in delta_net_or_attention(fields)),
    tensors=_TENSORS,
    constants={
        "recurrent_layer": "gated_delta_net",
        "qk_layernorm": True,
        "attention_output_gate": True,
        "apply_layernorm_1p": True,
        "swiglu": True,
    },
    derived=_derived,
    prediction=lambda _: "*-",
)
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    text=lambda raw: text_fields(raw, QWEN3_5_TEXT.model_type),
)
