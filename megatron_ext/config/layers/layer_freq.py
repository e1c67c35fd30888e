"""Layers of a GPT that have experts, or attention in a window, in Megatron-LM's notation.

`--moe-layer-freq` N puts experts into every Nth layer, beginning with the first; `--window-attn-skip-freq` N leaves
every Nth layer without a window. Instead of a number either may have a list with 1 for each layer with experts, or with
a window, and 0 for each other one. On a command line a list is an expression of Python's, such as `([0]*1+[1]*3)`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TypeGuard

from megatron_ext.errors import ConfigError

EVERY_LAYER = 1
_MAX_TEXT = 20_000  # characters; enough for any list of the layers of one model
_MAX_ITEMS = 4096


def parse_layer_freq(text: str, flag: str = "--moe-layer-freq") -> int | list[int]:
    """Parse the value of a flag: a number, or an expression of lists, `+` and `*`.

    Args:
        text: Value as typed.
        flag: Name of the flag, for messages.

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
        count: Number of layers.

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
