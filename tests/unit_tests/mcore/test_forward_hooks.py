"""Hooks that a step which does not call a module would leave out."""

from __future__ import annotations

from torch import nn

from megatron_ext.mcore.layers.residual_layers import forward_hooks


def test_hooks_before_and_after_a_forward_are_found():
    module, before, after = nn.Linear(2, 2), lambda *_: None, lambda *_: None
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    assert forward_hooks(module) == [before, after]
