"""Residual stream of the layers. A sum is deferred to the norm that reads it, so that one kernel computes both."""

from __future__ import annotations

from megatron.core.inference.contexts import BaseInferenceContext
from torch import Tensor, nn

from megatron_ext.mcore.layers.residual_layers import Branching, MixerOutput, add_residual
from megatron_ext.ops.gated_norm import add_and_norm


class ResidualStream:
    """Hidden states of a step as they pass through the layers.

    Args:
        hidden_states: [s, b, h]; not overwritten.
    """

    def __init__(self, hidden_states: Tensor) -> None:
        self._states = hidden_states
        self._waiting: tuple[MixerOutput, float] | None = None  # deferred summand and its factor

    def through(
        self,
        layer: nn.Module,
        attention_mask: Tensor | None,
        context: BaseInferenceContext | None,
        angles: Tensor | None,
    ) -> None:
        """Compute a layer; a branch's sum is deferred. Layers with hooks are called normally."""
        branch = None
        if isinstance(layer, Branching) and not _is_watched(layer):
            branch = layer.branch(attention_mask, context, angles)
        if branch is not None:
            self._waiting = branch.mix(self.normed(branch.norm)), branch.factor
            return
        found = layer(self.states(), attention_mask, inference_context=context, rotary_pos_emb=angles)
        self._states = found[0] if isinstance(found, tuple) else found

    def states(self) -> Tensor:
        """Return the hidden states with all sums done, [s, b, h]."""
        if self._waiting is not None:
            mixed, factor = self._waiting
            self._states, self._waiting = add_residual(mixed, self._states, factor), None
        return self._states

    def normed(self, norm: nn.Module) -> Tensor:
        """Return a norm of the hidden states with all sums done, [s, b, h]."""
        if self._waiting is not None:
            (output, bias), factor = self._waiting
            found = add_and_norm(output, self._states, norm, factor) if bias is None else None
            if found is not None:
                (self._states, normed), self._waiting = found, None
                return normed
        normed_states: Tensor = norm(self.states())
        return normed_states


def _is_watched(layer: nn.Module) -> bool:
    """Return whether the layer has forward hooks."""
    return bool(layer._forward_pre_hooks or layer._forward_hooks)
