"""Inputs of the logits processors for the rows of a step: layout, writing, and the processors applied to them.

The same for eager steps, whose lists have exact lengths, and for captured ones, whose lists have room for any step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from megatron_ext.runner.layout import Layout, Shape
from megatron_ext.runner.logits_processors import (
    COLUMNS,
    PROCESSORS,
    TOKEN_LISTS,
    LogitsInputs,
    LogitsProcessor,
    options_of,
    pack,
    values_of,
)
from megatron_ext.scheduling.step import Sampling

_MASK_BITS: Final = 64  # bits of a number of a mask on its way to the device
_EVERY_TOKEN: Final = -1  # all bits of a number set
Arrays = Mapping[str, np.ndarray]


def process_logits(logits: Tensor, parts: Mapping[str, Tensor], processors: Sequence[LogitsProcessor]) -> Tensor:
    """Apply logits processors to a copy; a row's result depends on that row alone: [R, V] -> [R, V] fp32.

    Args:
        logits: [R, V] of any type.
        parts: Arrays of `logits_layout` on the device.
        processors: Some of `PROCESSORS`, in their order.
    """
    rows, words = logits.shape
    values = torch.empty(rows + 1, words, dtype=torch.float32, device=logits.device)
    values[:rows].copy_(logits)
    values[rows].zero_()
    inputs = LogitsInputs(parts, rows, words)
    for one in processors:
        one.apply(values, inputs)
    return values[:rows]


def needs_processing(sampling: Sampling) -> bool:
    """Return whether a row has logits processors."""
    return sampling.logits_options is not None or bool(sampling.forbidden)


def needs_mask(sampling: Sampling) -> bool:
    """Return whether a row has a mask of allowed tokens, as for structured output."""
    return options_of(sampling).allowed is not None


def room_for(rows: int) -> dict[str, int]:
    """Return the entries of each token list in a captured step of `rows` rows."""
    return {name: min(rows * one.room[0], one.room[1]) for name, one in TOKEN_LISTS.items()}


def entry_counts(rows: Sequence[Sampling | None], words: int) -> dict[str, int]:
    """Return the entries of each token list that these rows need."""
    asked = [one for one in rows if one is not None and needs_processing(one)]
    return {name: sum(len(tokens.of(one, words)) for one in asked) for name, tokens in TOKEN_LISTS.items()}


def logits_layout(rows: int, entries: Mapping[str, int], words: int, *, has_mask: bool) -> Layout:
    """Return the layout of all inputs of the processors; the longest list and the masks come last.

    Args:
        rows: R.
        entries: Entries of each token list.
        words: V.
        has_mask: True to have masks.
    """
    columns: dict[str, Shape] = dict.fromkeys(COLUMNS, (rows + 1,))
    values: dict[str, Shape] = {values_of(name): (entries[name],) for name, one in TOKEN_LISTS.items() if one.values}
    lists: dict[str, Shape] = {name: (entries[name],) for name in _by_length(entries)}
    masks: dict[str, Shape] = {"masks": (rows + 1, -(-words // _MASK_BITS))} if has_mask else {}
    shapes = {"used": (len(TOKEN_LISTS),)} | columns | values | lists | masks
    return Layout(shapes, frozenset(columns) | frozenset(values))


def write_logits_inputs(rows: Sequence[Sampling | None], words: int, arrays: Arrays) -> dict[str, int]:
    """Fill the arrays of `logits_layout`.

    Args:
        rows: Sampling options of each row; None for padding rows.
        words: V; forbidden tokens outside the vocabulary are left out.
        arrays: Arrays by name.

    Returns:
        The used entries of each token list.
    """
    asked = [(row, one) for row, one in enumerate(rows) if one is not None and needs_processing(one)]
    for name, column in COLUMNS.items():
        arrays[name].fill(column.neutral)
        for row, one in asked:
            arrays[name][row] = column.of(one)
    used = {name: _write_list(name, asked, words, arrays) for name in TOKEN_LISTS}
    arrays["used"][:] = list(used.values())
    if "masks" in arrays:
        _write_masks(asked, arrays["masks"])
    return used


def unsent_entries(entries: Mapping[str, int], used: Mapping[str, int]) -> int:
    """Return the unused numbers at the end of a layout without masks, which need not be sent to the device."""
    longest = _by_length(entries)[-1]
    return entries[longest] - used[longest]


def asked_processors(arrays: Arrays, used: Mapping[str, int]) -> tuple[LogitsProcessor, ...]:
    """Return the processors that change the rows that `write_logits_inputs` has written."""
    return tuple(
        one
        for one in PROCESSORS
        if any(used[name] for name in one.lists)
        or (one.has_mask and "masks" in arrays)
        or (not one.lists and any((arrays[name] != column.neutral).any() for name, column in one.columns.items()))
    )


def _write_list(name: str, asked: Sequence[tuple[int, Sampling]], words: int, arrays: Arrays) -> int:
    """Fill a token list and its numbers; return the used entries."""
    one, end = TOKEN_LISTS[name], 0
    for row, sampling in asked:
        tokens = np.asarray(one.of(sampling, words), dtype=np.int64)
        if not len(tokens):
            continue
        places, end = slice(end, end + len(tokens)), end + len(tokens)
        bits = 0 if one.bits is None else one.bits(sampling)
        arrays[name][places] = pack(row, tokens, bits)
        if one.values is not None:
            arrays[values_of(name)][places] = one.values(sampling)
    return end


def _write_masks(asked: Sequence[tuple[int, Sampling]], masks: np.ndarray) -> None:
    masks.fill(_EVERY_TOKEN)
    numbers = masks.view(np.int32)
    for row, sampling in asked:
        allowed = options_of(sampling).allowed
        if allowed is not None:
            found = np.frombuffer(allowed, np.int32)
            width = min(numbers.shape[1], len(found))  # either may have one number more
            numbers[row, :width] = found[:width]


def _by_length(entries: Mapping[str, int]) -> list[str]:
    return sorted(entries, key=lambda name: entries[name])
