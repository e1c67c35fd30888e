"""Registry of the supported families, which the files of `families/` define."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.families.decoders import GPT_OSS, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE
from megatron_ext.models.huggingface.families.lfm2 import LFM2, LFM2_MOE
from megatron_ext.models.huggingface.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from megatron_ext.models.huggingface.families.mamba_hybrids import BAMBA, FALCON_H1, GRANITE_MOE_HYBRID, JAMBA
from megatron_ext.models.huggingface.families.nemotron_h import NEMOTRON_H
from megatron_ext.models.huggingface.families.olmo_hybrid import OLMO_HYBRID
from megatron_ext.models.huggingface.families.qwen_hybrids import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Fields

FAMILIES = {
    family.model_type: family
    for family in (
        NEMOTRON_H,
        LLAMA,
        QWEN3_NEXT,
        MAMBA,
        FALCON_MAMBA,
        JAMBA,
        MAMBA2,
        BAMBA,
        GRANITE_MOE_HYBRID,
        LFM2,
        LFM2_MOE,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        MISTRAL,
        MIXTRAL,
        FALCON_H1,
        QWEN3_5_TEXT,
        QWEN3_5,
        QWEN3_5_MOE_TEXT,
        QWEN3_5_MOE,
        OLMO_HYBRID,
        GPT_OSS,
    )
}
WRITTEN = NEMOTRON_H  # models that are written without an example are of this family


def family_of(raw: Fields) -> Family:
    """Return the family of a decoded `config.json`.

    Raises:
        ConfigError: The family is not supported.
    """
    if raw.get("format") == "megatron_ext":
        raise ConfigError("config.json belongs to a checkpoint that this package saved; give --load")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(f"{name!r} ({family.architecture})" for name, family in FAMILIES.items())
        raise ConfigError(f"config.json: model_type {model_type!r} is not supported; supported are {supported}")
    return FAMILIES[model_type]
