"""Letters of layers: what each is, by what has to be known of it elsewhere.

M, *, -, E and W are Megatron's. The others are for models that it has not.
"""

from __future__ import annotations

LAYER_SYMBOLS = {
    "M": "recurrent",
    "*": "attention",
    "-": "MLP",
    "E": "MoE",
    "P": "attention and recurrent side by side",
    "A": "attention with its norm behind",
    "F": "MLP with its norm behind",
    "W": "attention in a window",
}

_RECURRENT, _ATTENTION, _MLPS = frozenset("MP"), frozenset("*PAW"), frozenset("-F")


def is_recurrent(letter: str) -> bool:
    """Whether a layer carries recurrent states."""
    return letter in _RECURRENT


def is_attention(letter: str) -> bool:
    """Whether a layer has keys and values."""
    return letter in _ATTENTION


def is_mlp(letter: str) -> bool:
    """Whether a layer is an MLP, and no mixture of them."""
    return letter in _MLPS
