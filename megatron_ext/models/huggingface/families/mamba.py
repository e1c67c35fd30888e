"""Mamba, FalconMamba and Mamba2 checkpoints of Hugging Face: all layers are mixers.

- `intermediate_size` is the width, regardless of `expand`, as in transformers.
- `residual_in_fp32` is for weights in 16 bits and ignored; sums of layers are in the parameters' type here.
- The models have no maximum sequence length; ours have the default one, unless `--max-position-embeddings` is given.
- `time_step_min`, `time_step_max`, `time_step_floor`, `time_step_scale` and `time_step_init_scheme` are settings of
  dt's initialization.
- Mamba-2's gate is applied before the norm, regardless of `norm_before_gate`, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import SILU, Fields, FieldTable, Values, names
from megatron_ext.models.huggingface.tensors import (
    MAMBA1_TENSORS,
    MAMBA2_TENSORS,
    LayerTable,
    TensorTable,
    copied,
    weights,
)

TIME_STEP_LIMIT: Mapping[str, tuple[object, ...]] = {"time_step_limit": ((0.0, math.inf),)}

_FIELDS = FieldTable(
    sizes={
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "state_size": "mamba_state_dim",
        "conv_kernel": "mamba_conv_kernel",
    },
    numbers={"layer_norm_epsilon": ("norm_epsilon", 1e-5)},
    fixed={
        "hidden_act": SILU,
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "rms_norm": (True,),
        "residual_in_fp32": (True, False),
    },
    read=names("expand intermediate_size max_position_embeddings"),
)


def _width(fields: Fields) -> int:
    return fields.size("intermediate_size", fields.size("hidden_size") * fields.size("expand", 2))


def _positions(fields: Fields) -> Values:
    default = ModelConfig.max_position_embeddings
    return {"max_position_embeddings": fields.size("max_position_embeddings", default)}


def _tensors(mixer: LayerTable) -> TensorTable:
    return TensorTable(
        layers={"M": {**weights({"norm": "norm"}), **mixer}},
        letters_per_layer=1,
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        prefixes=("backbone.",),
    )


def dt_rank(fields: Fields, name: str) -> int:
    """Return the rank of dt; if "auto" or absent, a sixteenth of the hidden size."""
    return math.ceil(fields.size("hidden_size") / 16) if fields.get(name, "auto") == "auto" else fields.size(name)


MAMBA = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    fields=_FIELDS
    | FieldTable(
        # Published files give some sizes twice.
        other_names={"d_model": "hidden_size", "n_layer": "num_hidden_layers", "d_inner": "intermediate_size"},
        fixed={"ssm_cfg": ({},)},
        read=names("time_step_rank"),
        defaults={"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "state_size": 16, "conv_kernel": 4},
        is_tied=True,
    ),
    pattern=lambda fields: "M" * fields.layer_count,
    tensors=_tensors(copied("mixer", "mixer", MAMBA1_TENSORS)),
    constants={"recurrent_layer": "mamba1", "num_attention_heads": 1},  # no layer has heads
    derived=(
        lambda fields: {"mamba_inner_size": _width(fields), "mamba_dt_rank": dt_rank(fields, "time_step_rank")},
        _positions,
    ),
)

# FalconMamba: mixers normalize dt, B and C, without weights
FALCON_MAMBA = replace(
    MAMBA,
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    fields=MAMBA.fields | FieldTable(numbers={"mixer_rms_eps": ("mamba_inner_norm_epsilon", 1e-6)}),
    constants={**MAMBA.constants, "mamba_inner_norm": "plain"},
)


def _checked_positions(fields: Fields) -> Values:
    fields.check_divides("n_groups", "num_heads")
    heads, channels, width = fields.size("num_heads"), fields.size("head_dim"), _width(fields)
    if heads * channels != width:
        raise ConfigError(
            f"config.json: num_heads = {heads} of head_dim = {channels} do not make up the {width} channels of a layer"
        )
    return _positions(fields)


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    fields=_FIELDS
    | FieldTable(
        sizes={
            "head_dim": "mamba_head_dim",
            "num_heads": "mamba_num_heads",
            "n_groups": "mamba_num_groups",
            "chunk_size": "mamba_chunk_size",
        },
        fixed=TIME_STEP_LIMIT,
        defaults={
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "vocab_size": 32768,
            "state_size": 128,
            "conv_kernel": 4,
            "head_dim": 64,
            "num_heads": 128,
            "n_groups": 8,
            "chunk_size": 256,
        },
    ),
    pattern=MAMBA.pattern,
    tensors=_tensors(copied("mixer", "mixer", MAMBA2_TENSORS)),
    constants={"num_attention_heads": 1},  # no layer has heads
    derived=(_checked_positions,),
)

FAMILIES = (MAMBA, FALCON_MAMBA, MAMBA2)
