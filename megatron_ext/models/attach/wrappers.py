"""Wrappers around a model of Megatron in memory, and the model inside."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.forward_hooks import forward_hooks

# Classes whose `module` is the wrapped model, and whose forward computes the same.
_WRAPPERS = frozenset(("DistributedDataParallel", "Float16Module"))
_GPT = "GPTModel"
_MODELS = (_GPT, "MambaModel", "HybridModel")


def class_path(module: object) -> str:
    """Return module and name of an object's class."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_upstreams(module: object) -> bool:
    """Return whether an object's class is one of megatron-core."""
    return type(module).__module__.startswith("megatron.core.")


def is_gpt(model: nn.Module) -> bool:
    """Return whether an unwrapped model is a GPT, each of whose layers is two of ours."""
    return type(model).__name__ == _GPT


def unwrapped(model: object) -> nn.Module:
    """Return the model inside `Float16Module` and `DistributedDataParallel`.

    Args:
        model: A model, bare or wrapped, or the list of one that Megatron's training has.

    Raises:
        ConfigError: Another wrapper or one with hooks, another model, or several chunks of a virtual pipeline.
    """
    if isinstance(model, Sequence | nn.ModuleList) and not isinstance(model, str):
        if len(model) != 1:
            raise ConfigError(
                f"the model is a list of {len(model)} chunks of a virtual pipeline, which is not supported; "
                "train with one chunk on each stage"
            )
        model = model[0]
    while isinstance(model, nn.Module) and type(model).__name__ in _WRAPPERS:
        if forward_hooks(model):
            raise ConfigError(
                f"the model is in a {type(model).__name__} with forward hooks, which the engine would not call; remove "
                "them"
            )
        model = model.module
    if not isinstance(model, nn.Module) or not is_upstreams(model) or type(model).__name__ not in _MODELS:
        raise ConfigError(
            f"the model is of class {class_path(model)}; supported are {', '.join(_MODELS)} of megatron.core, bare or "
            f"in {' and '.join(sorted(_WRAPPERS))}"
        )
    return model
