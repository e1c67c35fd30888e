"""Mamba checkpoints of Hugging Face: `config.json` as a `ModelConfig`, tensors under megatron-core's names.

Layers are Mamba-1 mixers and nothing else. Everything that could change the logits is either translated or refused by
its name. What deserves a word:

- `intermediate_size` is the width, whatever `expand` says, as in transformers.
- `residual_in_fp32` is for weights in 16 bits; sums of layers are in the parameters' type here, whatever it says.
- The models have no longest sequence; ours have the default one, unless `--max-position-embeddings` says otherwise.
- `time_step_min`, `time_step_max`, `time_step_floor`, `time_step_scale` and `time_step_init_scheme` say how dt is drawn
  before training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.fields import (
    WITHOUT_EFFECT,
    check_architecture,
    check_fixed,
    check_known,
    flag,
    layers,
    positive_number,
    size,
    size_or,
    with_present_names,
)
from megatron_ext.models.huggingface.weights import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    OUTPUT,
    fill_model,
    names_without_prefix,
)
from megatron_ext.models.weight_files import WeightFiles

MODEL_TYPE = "mamba"
ARCHITECTURE = "MambaForCausalLM"

# transformers' values of fields that files may leave out.
_DEFAULTS = {"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "state_size": 16, "conv_kernel": 4}
_DEFAULT_EXPAND = 2

# Published files say some sizes twice.
_OTHER_NAMES = {"d_model": "hidden_size", "n_layer": "num_hidden_layers", "d_inner": "intermediate_size"}

# Only these values are supported; a field that is absent has the first one.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_bias": (False,),
    "use_conv_bias": (True,),
    "rms_norm": (True,),
    "ssm_cfg": ({},),
    "residual_in_fp32": (True, False),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

_TRANSLATED = frozenset(
    """
    architectures model_type hidden_size num_hidden_layers vocab_size state_size conv_kernel expand intermediate_size
    time_step_rank layer_norm_epsilon tie_word_embeddings max_position_embeddings
    """.split()
)

# How weights were drawn before training, and which kernels to run.
_WITHOUT_EFFECT = frozenset(
    """
    time_step_min time_step_max time_step_floor time_step_scale time_step_init_scheme rescale_prenorm_residual
    use_mambapy use_falcon_mambapy use_associative_scan fused_add_norm pad_vocab_size_multiple
    """.split()
)
_KNOWN = set(_FIXED) | _TRANSLATED | _WITHOUT_EFFECT | WITHOUT_EFFECT

_PREFIXES = ("backbone.",)

# Ours, and theirs below a name of the mixer that each family has of its own.
MIXER_TENSORS = (
    "in_proj.weight conv1d.weight conv1d.bias x_proj.weight dt_proj.weight dt_proj.bias A_log D out_proj.weight".split()
)


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` of this family as a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    return ModelConfig(**translate_fields(raw, ARCHITECTURE))


def translate_fields(raw: dict[str, Any], architecture: str, own_fields: Iterable[str] = ()) -> dict[str, Any]:
    """What families of Mamba-1 layers only have in common, as fields of `ModelConfig`.

    Args:
        raw: The decoded `config.json`.
        architecture: Class of the model.
        own_fields: Names of fields that the family has beside Mamba's, for the caller to translate.

    Raises:
        ConfigError: A field is unknown, or has a value that is not supported.
    """
    check_architecture(raw, architecture)
    fields = with_present_names(raw, _OTHER_NAMES)
    check_known(fields, _KNOWN | set(own_fields))
    check_fixed(fields, _FIXED)
    fields = _DEFAULTS | fields
    hidden, expand = size(fields, "hidden_size"), size_or(fields, "expand", _DEFAULT_EXPAND)
    return {
        "hybrid_override_pattern": "M" * layers(fields),
        "recurrent_layer": "mamba1",
        "hidden_size": hidden,
        "vocab_size": size(fields, "vocab_size"),
        "mamba_state_dim": size(fields, "state_size"),
        "mamba_conv_kernel": size(fields, "conv_kernel"),
        "mamba_inner_size": size_or(fields, "intermediate_size", hidden * expand),
        "mamba_dt_rank": dt_rank(fields, "time_step_rank", hidden),
        "norm_epsilon": positive_number(fields, "layer_norm_epsilon", default=1e-5),
        "untie_embeddings_and_output_weights": not flag(fields, "tie_word_embeddings", default=True),
        "max_position_embeddings": size_or(fields, "max_position_embeddings", ModelConfig.max_position_embeddings),
        "num_attention_heads": 1,  # of no layer
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
    }


def dt_rank(fields: dict[str, Any], name: str, hidden_size: int) -> int:
    """The rank of dt; "auto", as absent, is a sixteenth of the hidden size."""
    return math.ceil(hidden_size / 16) if fields.get(name, "auto") == "auto" else size(fields, name)


def load_weights(model: nn.Module, config: ModelConfig, directory: Path) -> None:
    """Fill every tensor of `model`, built from `config`, in the types the parameters have.

    Raises:
        CheckpointError: See `fill_model`.
    """
    files = WeightFiles(directory)
    fill_model(model, config, files, names_without_prefix(files, _PREFIXES), _tensor_sources(config))


def _tensor_sources(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Our parameter names to the tensors that they come from, theirs without prefix."""
    sources: dict[str, tuple[str, ...]] = {EMBEDDING: ("embeddings.weight",), FINAL_NORM: ("norm_f.weight",)}
    for index in range(config.layer_count):
        for name in ("norm.weight", *(f"mixer.{tensor}" for tensor in MIXER_TENSORS)):
            sources[f"decoder.layers.{index}.{name}"] = (f"layers.{index}.{name}",)
    if config.untie_embeddings_and_output_weights:
        sources[OUTPUT] = (LM_HEAD,)
    return sources
