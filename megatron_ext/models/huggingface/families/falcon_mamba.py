"""FalconMamba checkpoints of Hugging Face: Mamba's, whose mixers normalize dt, B and C, without weights."""

from __future__ import annotations

from typing import Any

from megatron_ext.config import ModelConfig
from megatron_ext.models.huggingface.families.mamba import load_weights as load_weights
from megatron_ext.models.huggingface.families.mamba import translate_fields
from megatron_ext.models.huggingface.fields import positive_number

MODEL_TYPE = "falcon_mamba"
ARCHITECTURE = "FalconMambaForCausalLM"
_DEFAULT_EPSILON = 1e-6


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` of this family as a `ModelConfig`.

    Raises:
        ConfigError: A field is unknown, or has a value that is not supported.
    """
    return ModelConfig(
        **translate_fields(raw, ARCHITECTURE, own_fields=("mixer_rms_eps",)),
        mamba_inner_norm="plain",
        mamba_inner_norm_epsilon=positive_number(raw, "mixer_rms_eps", default=_DEFAULT_EPSILON),
    )
