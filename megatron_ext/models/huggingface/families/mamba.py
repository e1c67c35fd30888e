"""Mamba checkpoints of Hugging Face.

All layers are Mamba-1 mixers. Notes:

- `intermediate_size` is the width, regardless of `expand`, as in transformers.
- `residual_in_fp32` is for weights in 16 bits and ignored; sums of layers are in the parameters' type here.
- The models have no maximum sequence length; ours have the default one, unless `--max-position-embeddings` is given.
- `time_step_min`, `time_step_max`, `time_step_floor`, `time_step_scale` and `time_step_init_scheme` are settings of
  dt's initialization.
"""

from __future__ import annotations

import math

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.blocks import RECURRENT_NORM, mamba1_mixer, weights
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, layer_count, names, size, size_or
from megatron_ext.models.huggingface.tensors import TensorTable

_DEFAULT_EXPAND = 2


def dt_rank(fields: Fields, name: str) -> int:
    """Return the rank of dt; if "auto" or absent, a sixteenth of the hidden size."""
    return math.ceil(size(fields, "hidden_size") / 16) if fields.get(name, "auto") == "auto" else size(fields, name)


_FIELDS = FieldTable(
    # Published files give some sizes twice.
    other_names={"d_model": "hidden_size", "n_layer": "num_hidden_layers", "d_inner": "intermediate_size"},
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
        "ssm_cfg": ({},),
        "residual_in_fp32": (True, False),
    },
    read=names("expand intermediate_size time_step_rank max_position_embeddings"),
    defaults={"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "state_size": 16, "conv_kernel": 4},
    is_tied=True,
)


def _derived(fields: Fields) -> Fields:
    inner_size = size(fields, "hidden_size") * size_or(fields, "expand", _DEFAULT_EXPAND)
    return {
        "mamba_inner_size": size_or(fields, "intermediate_size", inner_size),
        "mamba_dt_rank": dt_rank(fields, "time_step_rank"),
        "max_position_embeddings": size_or(fields, "max_position_embeddings", ModelConfig.max_position_embeddings),
    }


MAMBA = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    fields=_FIELDS,
    pattern=lambda fields: "M" * layer_count(fields),
    tensors=TensorTable(
        layers={"M": {**weights({RECURRENT_NORM: "norm"}), **mamba1_mixer("mixer")}},
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        prefixes=("backbone.",),
    ),
    constants={"recurrent_layer": "mamba1", "num_attention_heads": 1},  # no layer has heads
    derived=_derived,
)
