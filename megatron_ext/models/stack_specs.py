"""Ownership of a stack spec, decided by its name alone, without importing it."""

from __future__ import annotations

from megatron_ext.config import RECURRENT_KINDS

OWN_SPECS = "megatron_ext.mcore.layer_specs"
MEGATRONS_MODULES = ("mamba_layer_specs", "hybrid_layer_specs", "gpt_layer_specs")
_MEGATRON = "megatron."


def is_own_spec(spec: tuple[str, str]) -> bool:
    """Return whether (module, name) is one of this package's specs."""
    return spec[0] == OWN_SPECS and spec[1] in {kind.stack_spec for kind in RECURRENT_KINDS.values()}


def is_megatrons_spec(spec: tuple[str, str]) -> bool:
    """Return whether (module, name) is one of Megatron's own specs, which ours replace."""
    return spec[0].startswith(_MEGATRON) and spec[0].rsplit(".", 1)[-1] in MEGATRONS_MODULES
