"""A version on the model, so that nothing computed with old weights is matched after new ones are in."""

from __future__ import annotations

from torch import nn

_ATTRIBUTE = "weights_version"


def weights_version(model: nn.Module) -> int:
    """How often the weights of `model` have been changed since it was built."""
    return getattr(model, _ATTRIBUTE, 0)


def mark_weights_changed(model: nn.Module) -> None:
    """Every loader calls this after it has written weights; engines around the model notice before their next step."""
    setattr(model, _ATTRIBUTE, weights_version(model) + 1)
