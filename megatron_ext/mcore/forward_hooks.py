"""Hooks on the forward of a module, which torch has no public list of."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def forward_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks that run before and after the forward of a module itself."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
