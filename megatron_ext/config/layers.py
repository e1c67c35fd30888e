"""Letters of layers, patterns of them in Megatron-LM's notation, and its flags for single layers of a GPT.

M, *, -, E and W are Megatron's letters. The others are for models that Megatron does not have.

`--moe-layer-freq` N puts experts into every Nth layer, beginning with the first; `--window-attn-skip-freq` N leaves
every Nth layer without a window. Instead of a number either may have a list with 1 for each layer with experts, or with
a window, and 0 for each other one. On a command line a list is an expression of Python's, such as `([0]*1+[1]*3)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from megatron_ext.errors import ConfigError

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

_RECURRENT_LETTERS, _ATTENTION_LETTERS, _MLP_LETTERS = frozenset("MP"), frozenset("*PAW"), frozenset("-F")


def is_recurrent(letter: str) -> bool:
    """Return whether a layer carries recurrent states."""
    return letter in _RECURRENT_LETTERS


def is_attention(letter: str) -> bool:
    """Return whether a layer has keys and values."""
    return letter in _ATTENTION_LETTERS


def is_mlp(letter: str) -> bool:
    """Return whether a layer is a plain MLP, not a mixture of experts."""
    return letter in _MLP_LETTERS


GPT = "gpt"
YARN = "yarn"  # Megatron's position embedding type of rope with stretched wavelengths
MODEL_PROVIDERS = (GPT, "hybrid", "mamba")  # "mamba" is the old name of "hybrid"
_STAGE, _PREDICTION = "|", "/"  # between pipeline stages; before multi-token prediction layers
_DELTA_NET, _RECURRENT = "G", "M"
_MISSING = {
    "D": "sparse attention over latents",
    "C": "compressed sparse attention",
    "H": "heavily compressed attention",
    "W": "attention in a window of Megatron's",
    "+": "multi-latent attention",
}


def read_pattern(text: str) -> tuple[str, str | None]:
    """Translate a pattern from Megatron's flags and checkpoints to this package's letters.

    Marks of pipeline stages are dropped, layers of multi-token prediction cut off. A G is a recurrent layer.

    Returns:
        One letter a layer, and the kind of the recurrent layers; None if the pattern does not say it.

    Raises:
        ConfigError: The pattern has unsupported layers, or recurrent layers of two kinds.
    """
    pattern = text.replace(_STAGE, "").partition(_PREDICTION)[0]
    for letter, name in _MISSING.items():
        if letter in pattern:
            raise ConfigError(
                f"pattern {text!r} has a layer {letter!r}, {name}, which is not there; M, G, *, - and E are"
            )
    if _DELTA_NET not in pattern:
        return pattern, None
    if _RECURRENT in pattern:
        raise ConfigError(f"pattern {text!r} has M and G; all recurrent layers of a model are of one kind")
    return pattern.replace(_DELTA_NET, _RECURRENT), "gated_delta_net"


def prediction_pattern(text: str) -> tuple[str, int]:
    """Return the pattern of one layer of multi-token prediction in a pattern of Megatron's, and the number of depths.

    Raises:
        ConfigError: The depths differ.
    """
    depths = text.split(_PREDICTION)[1:]
    if len(set(depths)) > 1:
        raise ConfigError(f"pattern {text!r} has layers of multi-token prediction that differ; they must be equal")
    return (depths[0].replace(_DELTA_NET, _RECURRENT), len(depths)) if depths else ("", 0)


def pattern_from_ratios(count: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Return the pattern of a hybrid model that Megatron's former flags describe by fractions of its layers.

    Attention layers are spread evenly between recurrent ones, which begin and end the model; then MLPs replace
    recurrent layers, the last one included.

    Args:
        attention_ratio: Fraction of attention layers, 0 to 1.
        mlp_ratio: Fraction of MLPs, 0 to 1; the sum of both is at most 1.
    """
    attention, mlps = round(count * attention_ratio), round(count * mlp_ratio)
    letters = [_RECURRENT] * count
    for place in _evenly(range(count), (count - attention) / (attention + 1)):
        letters[place] = "*"
    if mlps:
        recurrent = [place for place, letter in enumerate(letters) if letter == _RECURRENT]
        for place in _evenly(recurrent, (len(recurrent) - mlps) / mlps):
            letters[place] = "-"
    return "".join(letters)


def _evenly(places: Iterable[int], gap: float) -> Iterator[int]:
    """Choose places with `gap` others before each; summed in floats, whose rounding Megatron's models depend on."""
    others = gap
    for place in places:
        is_due = others < 0.5
        others += gap if is_due else -1.0
        if is_due:
            yield place


def gpt_pattern(mlps: str) -> str:
    """Return the pattern of a GPT.

    Args:
        mlps: For each layer - (an MLP) or E (experts).
    """
    return "".join(f"*{letter}" for letter in mlps)


def is_gpt_pattern(pattern: str) -> bool:
    """Return whether each pair of layers makes one GPT layer: attention or a replacement for it, and MLP or experts."""
    mixers, mlps = pattern[::2], pattern[1::2]
    return len(mixers) == len(mlps) and set(mixers) <= {"*", "W", _RECURRENT} and set(mlps) <= {"-", "E"}


def gpt_layers(pattern: str) -> int | None:
    """Return the number of GPT layers of a pattern; None if it is not a GPT's."""
    return len(pattern) // 2 if is_gpt_pattern(pattern) else None


EVERY_LAYER = 1
_MAX_TEXT = 20_000  # characters; enough for any list of the layers of one model
_MAX_ITEMS = 4096


def parse_layer_freq(text: str, flag: str = "--moe-layer-freq") -> int | list[int]:
    """Parse the value of a flag: a number, or an expression of lists, `+` and `*`.

    Raises:
        ConfigError: It is neither, or its list is longer than any model.
    """
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ConfigError(
            f"{flag} {shown!r} is neither a number of layers nor a list of 0 and 1, of at most {_MAX_ITEMS}; "
            "write 2 or ([0]*1+[1]*3)"
        ) from None
    return value


def moe_letters(freq: int | Sequence[int], count: int) -> str:
    """Return E for each layer with experts and - for each one with an MLP.

    Args:
        freq: A number of layers, or 0 or 1 for each layer.

    Raises:
        ValueError: The number is not positive, or the list is not one of 0 and 1 for each layer.
    """
    chosen = [index % freq == 0 for index in range(count)] if _is_number(freq) else _checked(freq, count)
    return "".join("-E"[is_chosen] for is_chosen in chosen)


def windowed_letters(mixers: str, freq: int | Sequence[int] | None) -> str:
    """Return the letters of a GPT's mixers with W instead of * for attention in a window.

    Args:
        mixers: One letter for each layer.
        freq: Value of `--window-attn-skip-freq`; None for a window in all layers.

    Raises:
        ValueError: As in `moe_letters`.
    """
    count = len(mixers)
    if freq is None:
        chosen = [True] * count
    else:
        chosen = [(index + 1) % freq != 0 for index in range(count)] if _is_number(freq) else _checked(freq, count)
    pairs = zip(mixers, chosen, strict=True)
    return "".join("W" if letter == "*" and is_chosen else letter for letter, is_chosen in pairs)


def _is_number(freq: int | Sequence[int]) -> TypeGuard[int]:
    """Return whether it is a number, which must be positive."""
    if isinstance(freq, int) and (isinstance(freq, bool) or freq <= 0):
        raise ValueError
    return isinstance(freq, int)


def _checked(freq: int | Sequence[int], count: int) -> list[bool]:
    """Return the items of a list of 0 and 1 for each layer."""
    if isinstance(freq, int) or len(freq) != count or any(type(item) is not int or item not in (0, 1) for item in freq):
        raise ValueError
    return [bool(item) for item in freq]


def _evaluate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=items):
            return [_number(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _bounded(_list(left), 1, _list(right))
        case ast.BinOp(left=ast.Constant() as times, op=ast.Mult(), right=right):
            return _bounded(_list(right), _number(times))
        case ast.BinOp(left=left, op=ast.Mult(), right=times):
            return _bounded(_list(left), _number(times))
    raise ValueError


def _list(node: ast.expr) -> list[int]:
    value = _evaluate(node)
    if isinstance(value, int):
        raise ValueError
    return value


def _number(node: ast.expr) -> int:
    value = _evaluate(node)
    if not isinstance(value, int):
        raise ValueError
    return value


def _bounded(items: list[int], times: int, more: Sequence[int] = ()) -> list[int]:
    if len(items) * times + len(more) > _MAX_ITEMS:
        raise ValueError
    return items * times + list(more)
