"""Logits processors in the order of docs/sampling.md: each with its inputs, their neutral values, and its formula.

Eager and captured steps use the same ones. A formula applies to every row at once, and no shape in it depends on
values, so it suits a CUDA graph. A new option of `RequestParams` that changes logits is a processor here, and nothing
else in this package. Letters: R rows, V words, n entries of a token list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.config import RequestParams
from megatron_ext.runner.layout import Layout, Shape
from megatron_ext.scheduling.step import LogitsOptions, Sampling

_ROW_BITS: Final = 32
_TOKEN_MASK: Final = (1 << (_ROW_BITS - 1)) - 1
_NO_OPTIONS: Final = LogitsOptions(RequestParams())


# Inputs


@dataclass(frozen=True)
class Column:
    """A number per row, [R + 1] float64.

    Attributes:
        of: Number of a row.
        neutral: Number of padding rows, and of the dummy row: without effect.
    """

    of: Callable[[Sampling], float]
    neutral: float = 0.0


@dataclass(frozen=True)
class TokenList:
    """Tokens of rows, [n] int64: an entry is a row, a token and one bit.

    Attributes:
        of: Tokens of a row, given V.
        room: Entries in a captured step: per row on average, and per step at most. 8 bytes each are copied.
        bits: Bit of each token of a row; None for zeros.
        values: A number for each token of a row, in a float64 array beside the list; None for a list without numbers.
    """

    of: Callable[[Sampling, int], Sequence[int]]
    room: tuple[int, int]
    bits: Callable[[Sampling], np.ndarray] | None = None
    values: Callable[[Sampling], Sequence[float]] | None = None


class Entries(NamedTuple):
    """Unpacked token list, [n] int64 each."""

    rows: Tensor
    tokens: Tensor
    bits: Tensor


class LogitsInputs:
    """Inputs of the processors on the device, for R rows and the dummy row after them.

    Args:
        parts: Arrays of `logits_layout`.
        rows: R.
        words: V.
    """

    def __init__(self, parts: Mapping[str, Tensor], rows: int, words: int) -> None:
        self._parts, self._rows, self._words = parts, rows, words

    def column(self, name: str) -> Tensor:
        """Return a number per row, [R + 1] float64."""
        return self._parts[name]

    def entries(self, name: str) -> Entries:
        """Return a token list; unused entries point to the dummy row.

        They are spread over its words, because a device adds to the same place one by one.
        """
        packed, count = self._parts[name], self._parts["used"][list(TOKEN_LISTS).index(name)]
        places = torch.arange(len(packed), device=packed.device)
        is_unused = places >= count
        return Entries(
            (packed >> _ROW_BITS).masked_fill(is_unused, self._rows),
            (places % self._words).where(is_unused, (packed >> 1) & _TOKEN_MASK),
            (packed & 1).masked_fill(is_unused, 0),
        )

    def values(self, name: str) -> Tensor:
        """Return the value of each entry of a token list, as its bias, [n] float64; arbitrary for unused entries."""
        return self._parts[values_of(name)]

    def allowed(self) -> Tensor:
        """Return which tokens the masks allow, [R + 1, V] bool: token t by bit t % 64 of number t / 64."""
        masks = self._parts["masks"]
        bits = torch.arange(8, device=masks.device)
        of_byte = (torch.arange(256, device=masks.device)[:, None] >> bits).bitwise_and_(1).bool()  # [256, 8]
        found = of_byte.view(torch.int64)[:, 0].index_select(0, masks.view(torch.uint8).flatten().int())
        return found.view(torch.bool).view(len(masks), -1)[:, : self._words]


def pack(row: int, tokens: np.ndarray, bits: np.ndarray | int = 0) -> np.ndarray:
    """Return the entries of a row's tokens [n]: [n] int64."""
    return (row << _ROW_BITS) + (tokens << 1) + bits


def values_of(name: str) -> str:
    """Return the name of the array beside a token list."""
    return f"{name}_values"


# Formulas: logits [R + 1, V] fp32 are modified.


def penalize(logits: Tensor, inputs: LogitsInputs) -> None:
    """Make tokens that occurred before less likely; a token has an entry for each time it occurred.

    Logits of prompt and generated tokens are divided by `repetition` if positive and multiplied by it if negative
    (Keskar et al. 2019, section 4.1). Then the logits of generated tokens are reduced by `frequency` for each
    occurrence and once by `presence`.
    """
    previous = inputs.entries("previous")
    places = previous.rows * logits.shape[1] + previous.tokens
    counts = torch.zeros(logits.numel(), dtype=torch.float32, device=logits.device)
    counts.scatter_add_(0, places, previous.bits.float())  # whole numbers: exact in any order
    generated = counts[places]
    repetition, presence, frequency = (
        inputs.column(name).float()[previous.rows] for name in ("repetition", "presence", "frequency")
    )
    values = logits[previous.rows, previous.tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * generated - presence * (generated > 0)
    logits.index_put_((previous.rows, previous.tokens), values)


def add_biases(logits: Tensor, inputs: LogitsInputs) -> None:
    """Add biases to the logits of single tokens; no row has a token twice.

    On CUDA `index_put_` would sort them first, and in some versions of torch read the size of the indices back.
    """
    biased = inputs.entries("biased")
    logits.view(-1).scatter_add_(0, biased.rows * logits.shape[1] + biased.tokens, inputs.values("biased").float())


def keep_allowed(logits: Tensor, inputs: LogitsInputs) -> None:
    """Keep only the tokens that a row's mask allows."""
    logits.masked_fill_(~inputs.allowed(), -torch.inf)


def rule_out(logits: Tensor, inputs: LogitsInputs) -> None:
    """Exclude tokens; a row that would have none left is unchanged."""
    ruled_out = inputs.entries("ruled_out")
    without = logits.index_put((ruled_out.rows, ruled_out.tokens), logits.new_full((), -torch.inf))
    is_empty = without.amax(-1, keepdim=True) == -torch.inf
    logits.copy_(torch.where(is_empty, logits, without))


def forbid(logits: Tensor, inputs: LogitsInputs) -> None:
    """Exclude tokens, even if none are left; before `min_p`, since a forbidden token may be the best one."""
    forbidden = inputs.entries("forbidden")
    logits.index_put_((forbidden.rows, forbidden.tokens), logits.new_full((), -torch.inf))


def drop_improbable(logits: Tensor, inputs: LogitsInputs) -> None:
    """Keep the tokens that, at the row's temperature, have at least `min_p` of the best one's probability."""
    limits = torch.finfo(torch.float32)
    reach = inputs.column("min_p").log() * inputs.column("min_p_temperature")  # log 0 means no limit
    reach = reach.clamp(min=limits.min).float()[:, None]
    logits.masked_fill_(logits - logits.amax(-1, keepdim=True) < reach, -torch.inf)


# Options of a row


def options_of(sampling: Sampling) -> LogitsOptions:
    """Return the logits options of a row; neutral ones if it has none."""
    return sampling.logits_options or _NO_OPTIONS


def _params(sampling: Sampling) -> RequestParams:
    return options_of(sampling).params


def _previous_tokens(sampling: Sampling, _: int) -> Sequence[int]:
    return options_of(sampling).tokens[_first_counted(sampling) :]


def _is_generated(sampling: Sampling) -> np.ndarray:
    options = options_of(sampling)
    return np.arange(_first_counted(sampling), len(options.tokens)) >= options.prompt_length


def _first_counted(sampling: Sampling) -> int:
    """Return the index of the first token that penalties count: prompt tokens count for repetition only."""
    options = options_of(sampling)
    if not options.params.has_penalties:
        return len(options.tokens)
    return 0 if options.params.repetition_penalty != 1 else options.prompt_length


def _biased(sampling: Sampling, _: int) -> Sequence[int]:
    return [token for token, _ in _params(sampling).logit_bias]


def _biases(sampling: Sampling) -> Sequence[float]:
    return [bias for _, bias in _params(sampling).logit_bias]


def _ruled_out(sampling: Sampling, _: int) -> Sequence[int]:
    return options_of(sampling).ruled_out


def _forbidden(sampling: Sampling, words: int) -> Sequence[int]:
    return [token for token in sampling.forbidden if 0 <= token < words]


def _min_p(sampling: Sampling) -> float:
    return 0.0 if sampling.uniform is None else _params(sampling).min_p


@dataclass(frozen=True)
class LogitsProcessor:
    """One kind of change to logits.

    Attributes:
        apply: Changes the logits [R + 1, V] of all rows.
        columns: Numbers per row, by name; without lists, the processor is skipped in eager steps if all are neutral.
        lists: Token lists, by name; the processor is skipped in eager steps if all are empty.
        has_mask: True if it reads the masks.
    """

    apply: Callable[[Tensor, LogitsInputs], None]
    columns: Mapping[str, Column] = field(default_factory=dict)
    lists: Mapping[str, TokenList] = field(default_factory=dict)
    has_mask: bool = False


PROCESSORS: Final = (
    LogitsProcessor(
        penalize,
        columns={
            "repetition": Column(lambda one: _params(one).repetition_penalty, neutral=1.0),
            "presence": Column(lambda one: _params(one).presence_penalty),
            "frequency": Column(lambda one: _params(one).frequency_penalty),
        },
        lists={"previous": TokenList(_previous_tokens, (4096, 1 << 18), bits=_is_generated)},
    ),
    LogitsProcessor(add_biases, lists={"biased": TokenList(_biased, (512, 1 << 13), values=_biases)}),
    LogitsProcessor(keep_allowed, has_mask=True),
    LogitsProcessor(rule_out, lists={"ruled_out": TokenList(_ruled_out, (256, 1 << 13))}),
    LogitsProcessor(forbid, lists={"forbidden": TokenList(_forbidden, (64, 1 << 12))}),
    LogitsProcessor(
        drop_improbable,
        columns={
            "min_p": Column(_min_p),
            "min_p_temperature": Column(lambda one: one.temperature if _min_p(one) else 1.0, neutral=1.0),
        },
    ),
)
COLUMNS: Final = dict(chain.from_iterable(one.columns.items() for one in PROCESSORS))
TOKEN_LISTS: Final = dict(chain.from_iterable(one.lists.items() for one in PROCESSORS))


# Layout and writing of the inputs: the same for eager steps, whose lists have exact lengths, and for captured ones,
# whose lists have room for any step.

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
