"""NemotronH checkpoints of Hugging Face: `config.json` as a `ModelConfig`, tensors under megatron-core's names.

Everything that could change the logits is either translated or refused by its name. Two fields deserve a word:

- `time_step_limit` clamps dt after softplus. megatron-core does not clamp, so only (0, inf), which every published
  checkpoint has, is accepted.
- `time_step_min`, `time_step_max` and `time_step_floor` say how dt's bias is drawn before training and are ignored.
  transformers (5.23) is at odds with itself here: its chunk path clamps dt at `time_step_min` whatever
  `time_step_limit` says, its one-token path does not clamp. The models were trained without a clamp: so we run them.

Mixer, norm and MLP tensors have the same shapes on both sides. Experts are two matrices each on both sides;
transformers may write those of a layer as two tensors with a dimension more, which are cut up.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import (
    WITHOUT_EFFECT,
    check_architecture,
    check_divides,
    check_fixed,
    check_known,
    flag,
    positive_number,
    size,
    with_present_names,
)
from megatron_ext.models.huggingface.moe import MOE_FIELDS, translate_moe
from megatron_ext.models.huggingface.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    OUTPUT,
    QKV,
    fill_model,
    names_without_prefix,
)
from megatron_ext.models.weight_files import WeightFiles

MODEL_TYPE = "nemotron_h"
ARCHITECTURE = "NemotronHForCausalLM"

_OTHER_NAMES = {
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
}

# Positive integers, under their names in `ModelConfig`.
_SIZES = {
    "chunk_size": "mamba_chunk_size",
    "conv_kernel": "mamba_conv_kernel",
    "head_dim": "kv_channels",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_heads": "mamba_num_heads",
    "max_position_embeddings": "max_position_embeddings",
    "n_groups": "mamba_num_groups",
    "num_attention_heads": "num_attention_heads",
    "ssm_state_size": "mamba_state_dim",
    "vocab_size": "vocab_size",
}

# Only these values are supported; a field that is absent has the first one.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "mamba_proj_bias": (False,),
    "use_conv_bias": (True,),
    "mlp_hidden_act": ("relu2",),
    "hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu", "swish"),
    "time_step_limit": ((0.0, math.inf),),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
    "residual_in_fp32": (False,),
    "num_nextn_predict_layers": (0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

_LAYER_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}

# Translated below, one by one.
_TRANSLATED = frozenset(
    {
        "architectures",
        "hybrid_override_pattern",
        "layer_norm_epsilon",
        "layers_block_type",
        "model_type",
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
    }
)

# How weights were drawn before training, and the width factor `expand`, since heads times head size decides. NemotronH
# attention has no rotary embedding, though some files carry its base.
_WITHOUT_EFFECT = frozenset(
    """
    expand mamba_expand rescale_prenorm_residual
    time_step_min time_step_max time_step_floor mamba_dt_min mamba_dt_max mamba_dt_init_floor
    rope_theta partial_rotary_factor use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep
    moe_shared_expert_overlap output_router_logits mtp_layers_block_type mtp_hybrid_override_pattern
    """.split()
)
_KNOWN = set(_SIZES) | set(_FIXED) | _TRANSLATED | _WITHOUT_EFFECT | WITHOUT_EFFECT | MOE_FIELDS

# Published files say "backbone.", some written by transformers say "model.".
_PREFIXES = ("backbone.", "model.")

# Ours below `decoder.layers.N.`, theirs below `layers.N.`.
_LAYER_TENSORS: dict[str, dict[str, tuple[str, ...]]] = {
    "M": {
        "norm.weight": ("norm.weight",),
        "mixer.A_log": ("mixer.A_log",),
        "mixer.D": ("mixer.D",),
        "mixer.dt_bias": ("mixer.dt_bias",),
        "mixer.conv1d.weight": ("mixer.conv1d.weight",),
        "mixer.conv1d.bias": ("mixer.conv1d.bias",),
        "mixer.in_proj.weight": ("mixer.in_proj.weight",),
        "mixer.norm.weight": ("mixer.norm.weight",),
        "mixer.out_proj.weight": ("mixer.out_proj.weight",),
    },
    "*": {
        "input_layernorm.weight": ("norm.weight",),
        QKV: ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
        "self_attention.linear_proj.weight": ("mixer.o_proj.weight",),
    },
    "-": {
        "pre_mlp_layernorm.weight": ("norm.weight",),
        "mlp.linear_fc1.weight": ("mixer.up_proj.weight",),
        "mlp.linear_fc2.weight": ("mixer.down_proj.weight",),
    },
    "E": {  # and those of each expert, see `_layer_tensors`
        "pre_mlp_layernorm.weight": ("norm.weight",),
        "mlp.router.weight": ("mixer.gate.weight",),
        "mlp.router.expert_bias": ("mixer.gate.e_score_correction_bias",),
        "mlp.shared_experts.linear_fc1.weight": ("mixer.shared_experts.up_proj.weight",),
        "mlp.shared_experts.linear_fc2.weight": ("mixer.shared_experts.down_proj.weight",),
    },
}
_LATENT_TENSORS = {
    "mlp.fc1_latent_proj.weight": ("mixer.fc1_latent_proj.weight",),
    "mlp.fc2_latent_proj.weight": ("mixer.fc2_latent_proj.weight",),
}
# All experts of a layer in one tensor [experts, rows, columns].
_FUSED_EXPERTS = re.compile(r"(.*\.mixer\.experts)\.(up_proj|down_proj)")


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` of this family as a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    check_architecture(raw, ARCHITECTURE)
    fields = with_present_names(raw, _OTHER_NAMES)
    check_known(fields, _KNOWN)
    check_fixed(fields, _FIXED)
    pattern = _pattern(fields)
    query_heads = size(fields, "num_attention_heads")
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] is None:  # transformers: as many as queries
        fields["num_key_value_heads"] = query_heads
    key_value_heads = size(fields, "num_key_value_heads")
    check_divides(fields, "num_key_value_heads", "num_attention_heads")
    check_divides(fields, "n_groups", "mamba_num_heads")
    return ModelConfig(
        **{ours: size(fields, theirs) for theirs, ours in _SIZES.items()},
        hybrid_override_pattern=pattern,
        group_query_attention=key_value_heads != query_heads,
        num_query_groups=key_value_heads,
        norm_epsilon=positive_number(fields, "layer_norm_epsilon", default=ModelConfig.norm_epsilon),
        untie_embeddings_and_output_weights=not flag(fields, "tie_word_embeddings", default=False),
        position_embedding_type="none",
        normalization="RMSNorm",
        squared_relu=True,
        swiglu=False,
        disable_bias_linear=True,
        **(translate_moe(fields) if "E" in pattern else {}),
    )


def _pattern(fields: dict[str, Any]) -> str:
    """One letter a layer, from the list of layer types, the pattern, or both if they agree."""
    listed, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    if listed is None and pattern is None:
        raise ConfigError("config.json: field layers_block_type (or hybrid_override_pattern) is missing")
    source = "hybrid_override_pattern" if listed is None else "layers_block_type"
    letters = pattern if listed is None else _listed_letters(listed)
    if not isinstance(letters, str) or set(letters) - set("M*-E"):
        raise ConfigError(
            f"config.json: {source} {letters!r} is not supported; supported are the letters M, *, - and E"
        )
    if pattern not in (None, letters):
        raise ConfigError(f"config.json: hybrid_override_pattern {pattern!r} contradicts layers_block_type {letters!r}")
    count = fields.get("num_hidden_layers", len(letters))
    if count != len(letters):
        raise ConfigError(f"config.json: num_hidden_layers {count!r} contradicts the {len(letters)} layers of {source}")
    return letters


def _listed_letters(listed: Any) -> str:
    if not isinstance(listed, list):
        raise ConfigError(f"config.json: layers_block_type = {listed!r} is not supported; it must be a list")
    for kind in listed:
        if not isinstance(kind, str) or kind not in _LAYER_LETTERS:
            known = ", ".join(_LAYER_LETTERS)
            raise ConfigError(f"config.json: layers_block_type has {kind!r}, not supported; known are {known}")
    return "".join(_LAYER_LETTERS[kind] for kind in listed)


def load_weights(model: nn.Module, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Raises:
        CheckpointError: See `fill_model`.
    """
    files = WeightFiles(directory)
    _split_fused_experts(files)
    fill_model(model, config, files, names_without_prefix(files, _PREFIXES), _tensor_sources(config))


def _tensor_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter names to the tensors that they come from, theirs without prefix."""
    sources: dict[str, tuple[str, ...]] = {EMBEDDING: ("embeddings.weight",)}
    for index, letter in enumerate(config.hybrid_override_pattern):
        for ours, theirs in _layer_tensors(letter, config).items():
            sources[f"decoder.layers.{index}.{ours}"] = tuple(f"layers.{index}.{name}" for name in theirs)
    sources[FINAL_NORM] = ("norm_f.weight",)
    if config.untie_embeddings_and_output_weights:
        sources[OUTPUT] = (LM_HEAD,)
    return sources


def _layer_tensors(letter: str, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    tensors = dict(_LAYER_TENSORS[letter])
    if letter == "E":
        for expert in range(config.num_experts):
            ours, theirs = f"mlp.experts.local_experts.{expert}", f"mixer.experts.{expert}"
            tensors[f"{ours}.linear_fc1.weight"] = (f"{theirs}.up_proj.weight",)
            tensors[f"{ours}.linear_fc2.weight"] = (f"{theirs}.down_proj.weight",)
        if config.moe_latent_size is not None:
            tensors |= _LATENT_TENSORS
    return tensors


def _split_fused_experts(files: WeightFiles) -> None:
    """Show `experts.up_proj` [experts, rows, columns] as published files have it: `experts.0.up_proj.weight`, ..."""
    for match in filter(None, map(_FUSED_EXPERTS.fullmatch, sorted(files.names))):
        experts, projection = match.groups()
        files.split(match.string, lambda index, e=experts, p=projection: f"{e}.{index}.{p}.weight")
