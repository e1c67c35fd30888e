"""NemotronH checkpoints of Hugging Face.

Notes on two fields:

- `time_step_limit` clamps dt after softplus. megatron-core does not clamp, so only (0, inf), which every published
  checkpoint has, is accepted.
- `time_step_min`, `time_step_max` and `time_step_floor` are settings of the initialization of dt's bias and are
  ignored. transformers (5.23) is inconsistent here: its chunk path clamps dt at `time_step_min` regardless of
  `time_step_limit`, its one-token path does not clamp. The models were trained without a clamp, so none is applied
  here, and checkpoints that are written have a `time_step_min` without effect.

The layer of multi-token prediction, which transformers skips, is a short stack of such layers: `enorm`, `hnorm` and
`eh_proj` are beside the tensors of its first layer, `final_layernorm` beside the tensors of its last.

Mixer, norm and MLP tensors have the same shapes on both sides. Experts are two matrices each on both sides;
transformers may write all experts of a layer as two tensors with one more dimension, which are split.
"""

from __future__ import annotations

import math

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.attention import attention_heads
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import DECODER_SIZES, SILU, Fields, FieldTable, Values, check_count, names
from megatron_ext.models.huggingface.moe import SIGMOID_FIELDS, described_experts, sigmoid_experts
from megatron_ext.models.huggingface.tensors import (
    EXPERT,
    MAMBA2_TENSORS,
    ROUTED_EXPERT,
    Source,
    TensorTable,
    attention,
    copied,
    plain_mlp,
    weights,
)

_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}

_FIELDS = FieldTable(
    other_names={
        "attention_head_dim": "head_dim",
        "layer_types": "layers_block_type",
        "mamba_chunk_size": "chunk_size",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_n_groups": "n_groups",
        "norm_eps": "layer_norm_epsilon",
        "num_local_experts": "n_routed_experts",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    sizes={
        **DECODER_SIZES,
        "chunk_size": "mamba_chunk_size",
        "conv_kernel": "mamba_conv_kernel",
        "head_dim": "kv_channels",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_num_heads": "mamba_num_heads",
        "n_groups": "mamba_num_groups",
        "ssm_state_size": "mamba_state_dim",
    },
    numbers={"layer_norm_epsilon": ("norm_epsilon", 1e-5)},
    fixed={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "use_conv_bias": (True,),
        "mlp_hidden_act": ("relu2",),
        "hidden_act": ("relu2",),
        "mamba_hidden_act": SILU,
        "time_step_limit": ((0.0, math.inf),),
        "sliding_window": (None,),
        "rope_scaling": (None,),
        "rope_parameters": (None,),
        "residual_in_fp32": (False,),
    },
    # Not used, though some files have them: the last ones, for attention has no rotary embedding, and heads times head
    # size decide the width of a mixer.
    read=names(
        """
        hybrid_override_pattern layers_block_type num_key_value_heads num_nextn_predict_layers mtp_layers_block_type
        mtp_hybrid_override_pattern expand mamba_expand rope_theta partial_rotary_factor
        """
    )
    | SIGMOID_FIELDS,
)

_NO_CLAMP = 1e-30  # a `time_step_min`
_LATENT = ("fc1_latent_proj.weight", "fc2_latent_proj.weight")
_TENSORS = TensorTable(
    layers={
        "M": {**weights({"norm": "norm"}), **copied("mixer", "mixer", MAMBA2_TENSORS)},
        "*": {**weights({"input_layernorm": "norm"}), **attention("mixer")},
        "-": {**weights({"pre_mlp_layernorm": "norm"}), **plain_mlp("mlp", "mixer")},
        "E": {
            **weights({"pre_mlp_layernorm": "norm", "mlp.router": "mixer.gate"}),
            "mlp.router.expert_bias": Source(("mixer.gate.e_score_correction_bias",)),
            **plain_mlp("mlp.shared_experts", "mixer.shared_experts"),
            **plain_mlp(ROUTED_EXPERT, f"mixer.experts.{EXPERT}"),
            **{f"mlp.{name}": Source((f"mixer.{name}",), needs="moe_latent_size") for name in _LATENT},
        },
    },
    letters_per_layer=1,
    embedding="embeddings.weight",
    final_norm="norm_f.weight",
    prefixes=("backbone.", "model."),  # published files have the first, some files of transformers the second
    # All experts of a layer in one tensor [experts, rows, columns].
    split={r"(.*\.mixer\.experts)\.(up_proj|down_proj)": r"\1.{index}.\2.weight"},
    ignored=r"mtp\..*",
    prediction={
        "enorm.weight": "mtp.layers.0.enorm.weight",
        "hnorm.weight": "mtp.layers.0.hnorm.weight",
        "eh_proj.weight": "mtp.layers.0.eh_proj.weight",
        "final_layernorm.weight": "mtp.layers.{last}.final_layernorm.weight",
    },
)


def _pattern(fields: Fields) -> str:
    """Return one letter a layer, from the list of layer types, the pattern, or both if they agree."""
    listed, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    if listed is None and pattern is None:
        raise ConfigError("config.json: field layers_block_type (or hybrid_override_pattern) is missing")
    source = "hybrid_override_pattern" if listed is None else "layers_block_type"
    letters = pattern if listed is None else fields.letters(source, _LETTERS)
    if not isinstance(letters, str) or set(letters) - set("M*-E"):
        raise ConfigError(
            f"config.json: {source} {letters!r} is not supported; supported are the letters M, *, - and E"
        )
    if pattern not in (None, letters):
        raise ConfigError(f"config.json: hybrid_override_pattern {pattern!r} contradicts layers_block_type {letters!r}")
    check_count(fields.get("num_hidden_layers", len(letters)), letters, source)
    return letters


def _prediction(fields: Fields) -> str:
    """Return the letters of the layer of multi-token prediction; absent, attention and experts."""
    listed, pattern = fields.get("mtp_layers_block_type"), fields.get("mtp_hybrid_override_pattern")
    if listed is not None:
        letters = fields.letters("mtp_layers_block_type", _LETTERS)
        if pattern not in (None, letters):
            raise ConfigError(
                f"config.json: mtp_hybrid_override_pattern {pattern!r} contradicts mtp_layers_block_type {letters!r}"
            )
        return letters
    if pattern is not None and not isinstance(pattern, str):
        raise ConfigError(f"config.json: mtp_hybrid_override_pattern {pattern!r} is not a text of one letter a layer")
    return pattern or "*E"


def _derived(fields: Fields) -> Values:
    fields.required("num_key_value_heads")
    fields.check_divides("n_groups", "mamba_num_heads")
    return attention_heads(fields)


def _described(config: ModelConfig) -> Values:
    fields = {
        **_FIELDS.described(config),
        "num_hidden_layers": config.layer_count,
        "hybrid_override_pattern": config.hybrid_override_pattern,
        "num_key_value_heads": config.query_groups,
        "time_step_min": _NO_CLAMP,
    }
    if config.is_moe:
        fields |= described_experts(config)
    if config.mtp_num_layers:
        fields["num_nextn_predict_layers"] = config.mtp_layer_count
        fields["mtp_hybrid_override_pattern"] = config.mtp_pattern
    return fields


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    fields=_FIELDS,
    pattern=_pattern,
    tensors=_TENSORS,
    constants={"squared_relu": True},
    derived=(_derived,),
    experts=sigmoid_experts,
    prediction=_prediction,
    described=_described,
)

FAMILIES = (NEMOTRON_H,)
