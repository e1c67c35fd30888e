"""Mamba2 checkpoints of Hugging Face.

All layers are Mamba-2 mixers. Notes:

- The gate is applied before the norm, regardless of `norm_before_gate`, as in transformers.
- `residual_in_fp32` is for weights in 16 bits and ignored; sums of layers are in the parameters' type here.
- The models have no maximum sequence length; ours have the default one, unless `--max-position-embeddings` is given.
"""

from __future__ import annotations

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.blocks import RECURRENT_NORM, mamba2_mixer, weights
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.field_table import SILU, FieldTable
from megatron_ext.models.huggingface.fields import Fields, check_divides, layer_count, names, size, size_or
from megatron_ext.models.huggingface.mamba2 import TIME_STEP_LIMIT
from megatron_ext.models.huggingface.tensors import TensorTable

_FIELDS = FieldTable(
    sizes={
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "state_size": "mamba_state_dim",
        "conv_kernel": "mamba_conv_kernel",
        "head_dim": "mamba_head_dim",
        "num_heads": "mamba_num_heads",
        "n_groups": "mamba_num_groups",
        "chunk_size": "mamba_chunk_size",
    },
    numbers={"layer_norm_epsilon": ("norm_epsilon", 1e-5)},
    fixed={
        "hidden_act": SILU,
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "rms_norm": (True,),
        "residual_in_fp32": (True, False),
        **TIME_STEP_LIMIT,
    },
    read=names("expand intermediate_size max_position_embeddings"),
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
)


def _derived(fields: Fields) -> Fields:
    check_divides(fields, "n_groups", "num_heads")
    heads, channels = size(fields, "num_heads"), size(fields, "head_dim")
    width = size_or(fields, "intermediate_size", size(fields, "hidden_size") * size_or(fields, "expand", 2))
    if heads * channels != width:
        raise ConfigError(
            f"config.json: num_heads = {heads} of head_dim = {channels} do not make up the {width} channels of a layer"
        )
    return {
        "max_position_embeddings": size_or(fields, "max_position_embeddings", ModelConfig.max_position_embeddings),
    }


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    fields=_FIELDS,
    pattern=lambda fields: "M" * layer_count(fields),
    tensors=TensorTable(
        layers={"M": {**weights({RECURRENT_NORM: "norm"}), **mamba2_mixer("mixer")}},
        embedding="embeddings.weight",
        final_norm="norm_f.weight",
        prefixes=("backbone.",),
    ),
    constants={"num_attention_heads": 1},  # no layer has heads
    derived=_derived,
)
