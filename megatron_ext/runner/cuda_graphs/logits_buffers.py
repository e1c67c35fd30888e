"""Static buffers of the logits processors: lists of bounded length, after all other inputs of a step.

Only steps with logits processors send them, and send only the used part of the longest list, which is the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Final

import numpy as np
from torch import Tensor

from megatron_ext.ops.sampling.graph_logits_processors import LogitsMetadata, pack
from megatron_ext.runner.cuda_graphs.input_buffers import Layout, Shape
from megatron_ext.scheduling.logits_options import LogitsOptions
from megatron_ext.scheduling.step import Sampling, ScheduledChunk

# Entries of each list: per row on average, and per step at most. 8 bytes each are copied, 16 for biases.
_ROOM: Final = {
    "came": (4096, 1 << 18),
    "biased": (512, 1 << 13),
    "ruled_out": (256, 1 << 13),
    "forbidden": (64, 1 << 12),
}
_OF_ROWS: Final = ("repetition", "presence", "frequency", "min_p")
_LONGEST: Final = "came"
_NEUTRAL: Final = {"repetition": 1.0}  # other defaults are 0
_WISHES: Final = tuple(one.name for one in fields(LogitsMetadata))
Arrays = Mapping[str, np.ndarray]


def capacity_of(rows: int) -> dict[str, int]:
    """Return the capacity of each list for a step of `rows` rows."""
    return {name: min(rows * each, most) for name, (each, most) in _ROOM.items()}


def with_logits_buffers(layout: Layout, rows: int) -> Layout:
    """Return a layout extended by the buffers of the logits processors of its rows."""
    room = capacity_of(rows)
    lists: dict[str, Shape] = {name: (room[name],) for name in (*[one for one in room if one != _LONGEST], _LONGEST)}
    of_rows: dict[str, Shape] = {name: (rows + (name != "min_p"),) for name in _OF_ROWS}
    shapes = {"used": (len(_ROOM),), **of_rows, "biases": (room["biased"],), **lists}
    return Layout({**layout.shapes, **shapes}, layout.fractions | {*_OF_ROWS, "biases"})


def needs_logits_processing(samplings: Iterable[Sampling]) -> bool:
    """Return whether any row has logits processors."""
    return any(one.logits_options is not None or one.forbidden for one in samplings)


def has_capacity(samplings: Sequence[Sampling], rows: int) -> bool:
    """Return whether the lists of these rows fit into a step of `rows` rows."""
    needed = dict.fromkeys(_ROOM, 0)
    for one in samplings:
        needed["forbidden"] += len(one.forbidden)
        if one.logits_options is not None:
            needed["came"] += len(one.logits_options.tokens) - _first_token(one.logits_options)
            needed["biased"] += len(one.logits_options.biases)
            needed["ruled_out"] += len(one.logits_options.bad_words)
    room = capacity_of(rows)
    return all(needed[name] <= room[name] for name in room)


def write_logits_buffers(chunks: Sequence[ScheduledChunk], vocabulary: int, arrays: Arrays) -> int:
    """Fill the arrays of `with_logits_buffers`.

    Args:
        chunks: One chunk per row.
        vocabulary: V; forbidden tokens outside the vocabulary are left out.
        arrays: Arrays by name.

    Returns:
        Numbers at the end of the layout that need not be sent.
    """
    for name in _OF_ROWS:
        arrays[name][:] = _NEUTRAL.get(name, 0.0)
    lists = _Lists(arrays)
    for row, sampling in enumerate(chunk.sampling for chunk in chunks):
        if sampling is None:
            continue
        possible = [token for token in sampling.forbidden if 0 <= token < vocabulary]
        lists.add("forbidden", row, possible)
        if sampling.logits_options is not None:
            _write_row(row, sampling.logits_options, arrays, lists)
    arrays["used"][:] = [lists.used[name] for name in _ROOM]
    return len(arrays[_LONGEST]) - lists.used[_LONGEST]


def logits_metadata_of(parts: Mapping[str, Tensor]) -> LogitsMetadata:
    """Return the device's view of the logits metadata."""
    return LogitsMetadata(**{name: parts[name] for name in _WISHES})


class _Lists:
    """Lists that are filled row by row.

    Attributes:
        used: Entries used in each list.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.used = dict.fromkeys(_ROOM, 0)

    def add(self, name: str, row: int, tokens: Sequence[int] | np.ndarray, bits: np.ndarray | int = 0) -> slice:
        """Append entries for the tokens of a row and return their places."""
        if not len(tokens):
            return slice(0, 0)
        places = slice(self.used[name], self.used[name] + len(tokens))
        self._arrays[name][places] = pack(row, np.asarray(tokens), bits)
        self.used[name] = places.stop
        return places


def _write_row(row: int, row_metadata: LogitsOptions, arrays: Arrays, lists: _Lists) -> None:
    arrays["min_p"][row] = row_metadata.min_p
    for name in ("repetition", "presence", "frequency"):
        arrays[name][row] = getattr(row_metadata, name)
    first = _first_token(row_metadata)
    came = np.asarray(row_metadata.tokens, dtype=np.int64)[first:]
    lists.add("came", row, came, np.arange(first, first + len(came)) >= row_metadata.prompt_length)
    places = lists.add("biased", row, [token for token, _ in row_metadata.biases])
    arrays["biases"][places] = [bias for _, bias in row_metadata.biases]
    lists.add("ruled_out", row, row_metadata.ruled_out)


def _first_token(row_metadata: LogitsOptions) -> int:
    """Return the index of the first token that penalties count: prompt tokens count for repetition only."""
    if not row_metadata.has_penalties:
        return len(row_metadata.tokens)
    return 0 if row_metadata.repetition != 1 else row_metadata.prompt_length
