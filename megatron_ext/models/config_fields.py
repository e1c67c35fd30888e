"""Model settings from outside (a checkpoint, a YAML file, flags): names, types and stack specs, checked before use."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.config import RECURRENT_KINDS, ModelConfig
from megatron_ext.config.annotations import FieldValues, MismatchError, field_types


def checked_fields(values: Mapping[str, object], where: str, error: type[ValueError]) -> FieldValues:
    """Check and convert fields for `ModelConfig(**fields)`: lists to tuples, integers to floats for float fields.

    Args:
        error: Exception type for an unknown name or a wrong type.
    """
    known = field_types(ModelConfig)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise error(f"{where} has unknown model field {', '.join(unknown)}; known are {', '.join(known)}")
    checked = {}
    for name, value in values.items():
        try:
            checked[name] = known[name].convert(value)
        except MismatchError:
            message = f"{where} has {name} = {value!r}; it must be of type {known[name].type_names}"
            raise error(message) from None
    return checked


OWN_SPECS = "megatron_ext.mcore.layer_specs"
MEGATRONS_MODULES = ("mamba_layer_specs", "hybrid_layer_specs", "gpt_layer_specs")
_MEGATRON = "megatron."


def is_own_spec(spec: tuple[str, str]) -> bool:
    """Return whether (module, name) is one of this package's specs."""
    return spec[0] == OWN_SPECS and spec[1] in {kind.stack_spec for kind in RECURRENT_KINDS.values()}


def is_megatrons_spec(spec: tuple[str, str]) -> bool:
    """Return whether (module, name) is one of Megatron's own specs, which ours replace."""
    return spec[0].startswith(_MEGATRON) and spec[0].rsplit(".", 1)[-1] in MEGATRONS_MODULES
