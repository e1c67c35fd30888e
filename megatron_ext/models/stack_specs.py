"""Whose a stack spec is, by its name alone: nothing is imported to find out."""

from __future__ import annotations

OWN_SPECS = "megatron_ext.mcore.layer_specs"
# Of each kind of recurrent layer.
STACK_SPECS = {
    "mamba2": "hybrid_stack_spec",
    "mamba1": "mamba1_stack_spec",
    "gated_delta_net": "gated_delta_net_stack_spec",
}
MEGATRONS_MODULES = ("mamba_layer_specs", "hybrid_layer_specs", "gpt_layer_specs")
_MEGATRON = "megatron."


def is_own_spec(spec: tuple[str, str]) -> bool:
    """Whether (module, name) is one of this package's."""
    return spec[0] == OWN_SPECS and spec[1] in STACK_SPECS.values()


def is_megatrons_spec(spec: tuple[str, str]) -> bool:
    """Whether (module, name) is one of Megatron's own, in whose place ours stand."""
    return spec[0].startswith(_MEGATRON) and spec[0].rsplit(".", 1)[-1] in MEGATRONS_MODULES
