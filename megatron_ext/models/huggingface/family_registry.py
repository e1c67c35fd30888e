"""Registry of the supported families, which the files of `families/` define."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.families import decoders, delta_net_hybrids, lfm2, mamba, mamba_hybrids, nemotron_h
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Values

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (nemotron_h, decoders, delta_net_hybrids, mamba, mamba_hybrids, lfm2)
    for family in module.FAMILIES
}
WRITTEN = nemotron_h.NEMOTRON_H  # models that are written without an example are of this family


def family_of(raw: Values) -> Family:
    """Return the family of a decoded `config.json`."""
    if raw.get("format") == "megatron_ext":
        raise ConfigError("config.json belongs to a checkpoint that this package saved; give --load")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(f"{name!r} ({family.architecture})" for name, family in FAMILIES.items())
        raise ConfigError(f"config.json: model_type {model_type!r} is not supported; supported are {supported}")
    return FAMILIES[model_type]
