"""MoE layers of a GPT: which of its layers have experts, from Megatron-LM's `--moe-layer-freq`.

A number N puts experts into every Nth layer, beginning with the first; a list has 1 for each layer with experts and 0
for each one with an MLP. On a command line a list is an expression in Python's notation, such as `([0]*1+[1]*3)`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from megatron_ext.errors import ConfigError

EVERY_LAYER = 1
_MAX_TEXT = 20_000  # characters; enough for any list of the layers of one model
_MAX_ITEMS = 4096


def parse_layer_freq(text: str) -> int | list[int]:
    """Parse the value of `--moe-layer-freq`: a number, or an expression of lists, `+` and `*`.

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
            f"--moe-layer-freq {shown!r} is neither a number of layers nor a list of 0 and 1, of at most {_MAX_ITEMS}; "
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
    if isinstance(freq, int):
        if isinstance(freq, bool) or freq <= 0:
            raise ValueError
        return "".join("-" if index % freq else "E" for index in range(count))
    if len(freq) != count or any(type(item) is not int or item not in (0, 1) for item in freq):
        raise ValueError
    return "".join("-E"[item] for item in freq)


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
