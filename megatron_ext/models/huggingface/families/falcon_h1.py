"""FalconH1 checkpoints of Hugging Face.

A decoder layer of theirs is two letters of the pattern, attention and a Mamba-2 mixer side by side (P) and then an MLP
(-), each with its norm and its residual. Its multipliers become ours:

- `ssm_in_multiplier` times each of `ssm_multipliers`: the factors of z, x, B, C and dt;
- `attention_in_multiplier` a and `key_multiplier` k: attention is linear in its values and has no biases, so its output
  is multiplied by a, and queries times keys by a * a * k;
- the first of `mlp_multipliers` is applied before the gate's activation, the second after the MLP.
"""

from __future__ import annotations

from megatron_ext.config.model_fields import GATE_FIRST, NORM_FIRST
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import attention_heads, rotated_head_size
from megatron_ext.models.huggingface.blocks import (
    MLP,
    MLP_NORM,
    RECURRENT_NORM,
    attention,
    gated_mlp,
    mamba2_mixer,
    weights,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import DECODER_SIZES, SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, flag, layer_count, names, positive_number, size_or
from megatron_ext.models.huggingface.mamba2 import (
    MAMBA2_DEFAULTS,
    MAMBA2_FIXED,
    MAMBA2_READ,
    MAMBA2_SIZES,
    mamba2_heads,
)
from megatron_ext.models.huggingface.rotary_fields import ROPE_FIELDS, SHARE, rotary_fields
from megatron_ext.models.huggingface.tensors import Source, TensorTable

_LAYER = "P-"
_DEFAULT_WIDTH = 1024  # default of transformers' `mamba_d_ssm`; null is `mamba_expand` times the width
_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}

_FIELDS = FieldTable(
    sizes={**DECODER_SIZES, **MAMBA2_SIZES},
    numbers={
        "rms_norm_eps": ("norm_epsilon", 1e-5),
        "embedding_multiplier": ("embedding_multiplier", 1.0),
        "lm_head_multiplier": ("logits_multiplier", 1.0),
        "ssm_out_multiplier": ("recurrent_output_multiplier", 1.0),
    },
    fixed={
        **MAMBA2_FIXED,
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "projectors_bias": (False,),
        "hidden_act": SILU,
        "mamba_use_mlp": (True,),
        "attn_layer_indices": (None,),
        "sliding_window": (None,),
        SHARE: (1.0, None),
    },
    read=names(
        """
        num_key_value_heads head_dim mamba_d_ssm mamba_rms_norm mamba_norm_before_gate mlp_multipliers ssm_multipliers
        key_multiplier attention_in_multiplier attention_out_multiplier ssm_in_multiplier
        """
    )
    | ROPE_FIELDS
    | MAMBA2_READ,
    defaults={**MAMBA2_DEFAULTS, "max_position_embeddings": 8192, "num_key_value_heads": 8},
)

_MIXER_NORM, _FEED_FORWARD_NORM = "input_layernorm", "pre_ff_layernorm"
_TENSORS = TensorTable(
    layers={
        "P": {
            **weights({RECURRENT_NORM: _MIXER_NORM}),
            **mamba2_mixer("mamba"),
            "mixer.norm.weight": Source(("mamba.norm.weight",), needs="mamba_gated_norm"),
            **attention("self_attn"),
        },
        "-": {**weights({MLP_NORM: _FEED_FORWARD_NORM}), **gated_mlp(MLP, "feed_forward")},
    },
    letters_per_layer=len(_LAYER),
    final_norm="final_layernorm.weight",
)


def _derived(fields: Fields) -> Fields:
    width = size_or(fields, "mamba_d_ssm", _DEFAULT_WIDTH) if fields.get("mamba_d_ssm", 0) is not None else None
    return {
        **attention_heads(fields),
        **rotated_head_size(fields),
        **rotary_fields(fields),
        **mamba2_heads(fields, width),
        "mamba_gated_norm": _gated_norm(fields),
        **_multipliers(fields),
    }


def _gated_norm(fields: Fields) -> str | None:
    has_norm = flag(fields, "mamba_rms_norm", default=False)
    is_norm_first = flag(fields, "mamba_norm_before_gate", default=True)
    return (NORM_FIRST if is_norm_first else GATE_FIRST) if has_norm else None


def _multipliers(fields: Fields) -> Fields:
    inputs, keys, outputs, ssm_inputs = (
        positive_number(fields, name, default=1.0)
        for name in ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier", "ssm_in_multiplier")
    )
    gate, down = _numbers(fields, "mlp_multipliers")
    channels = rotated_head_size(fields)["kv_channels"]
    assert isinstance(channels, int), channels
    return {
        "softmax_scale": channels**-0.5 * inputs * inputs * keys,
        "attention_output_multiplier": inputs * outputs,
        "mamba_multipliers": tuple(ssm_inputs * one for one in _numbers(fields, "ssm_multipliers")),
        "mlp_gate_multiplier": gate,
        "mlp_output_multiplier": down,
    }


def _numbers(fields: Fields, name: str) -> list[float]:
    """Return a list of multipliers; ones if it is null or absent."""
    count, listed = _LISTS[name], fields.get(name)
    if listed is None:
        return [1.0] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise ConfigError(
            f"config.json: {name} = {listed!r} is not supported; it must be a list of {count} positive numbers"
        )
    return [positive_number({name: one}, name) for one in listed]


FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    fields=_FIELDS,
    pattern=lambda fields: _LAYER * layer_count(fields),
    tensors=_TENSORS,
    constants={"swiglu": True},
    derived=_derived,
)
