"""Letters of layers in a pattern, and their properties.

M, *, -, E and W are Megatron's letters. The others are for models that Megatron does not have.
"""

from __future__ import annotations

LAYER_SYMBOLS = {
    "M": "recurrent",
    "*": "attention",
    "-": "MLP",
    "E": "MoE",
    "P": "attention and recurrent side by side",
    "A": "attention with its norm after it",
    "F": "MLP with its norm after it",
    "W": "attention in a window",
}

_RECURRENT, _ATTENTION, _MLPS = frozenset("MP"), frozenset("*PAW"), frozenset("-F")


def is_recurrent(letter: str) -> bool:
    """Return whether a layer carries recurrent states."""
    return letter in _RECURRENT


def is_attention(letter: str) -> bool:
    """Return whether a layer has keys and values."""
    return letter in _ATTENTION


def is_mlp(letter: str) -> bool:
    """Return whether a layer is a plain MLP, not a mixture of experts."""
    return letter in _MLPS
