"""Sampler: from a step's logits to tokens, for eager and captured steps alike, and log-probs of tokens.

Log-probs are computed a few rows at a time, so that the logits of a long prompt never exist all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.engine.result import Score
from megatron_ext.memory.budget import SCORING_BYTES
from megatron_ext.ops.sampling import SamplingMetadata, greedy_tokens, sample_tokens
from megatron_ext.ops.sampling.log_probs import filtered_logits, log_probs_of
from megatron_ext.ops.sampling.sampling_metadata import GREEDY
from megatron_ext.ops.varlen import to_device
from megatron_ext.runner.layout import Layout
from megatron_ext.runner.logits_processors import (
    LogitsProcessor,
    asked_processors,
    entry_counts,
    logits_layout,
    needs_mask,
    needs_processing,
    process_logits,
    write_logits_inputs,
)
from megatron_ext.scheduling.step import Sampling

# Bytes per logit of a row, at most: the output layer's logits, their copy in fp32, and its log-softmax.
_BYTES_PER_LOGIT = 12
_DRAWN: Final = 4  # times the memory of scoring a row, for rows that are sorted and weighed in fp64


def rows_at_once(vocabulary: int) -> int:
    """Return the number of rows of logits that are scored together, within `SCORING_BYTES`."""
    return max(1, SCORING_BYTES // (_BYTES_PER_LOGIT * vocabulary))


def score_rows(
    logits_of: Callable[[slice], Tensor],
    vocabulary: int,
    targets: Tensor,
    top_n: Sequence[int],
    keep: Callable[[Tensor], None] | None = None,
) -> tuple[Score, ...]:
    """Score k tokens; a row's scores depend on that row alone.

    Results reach the host in one read-back per kind, after everything is enqueued.

    Args:
        logits_of: Returns the logits [j - i, V] of rows [i, j) of the k rows.
        vocabulary: V.
        targets: Token ids, [k] int64.
        top_n: Number of best tokens to list for each row, k numbers.
        keep: Receives the log-probs [k], on the device; None keeps none.
    """
    max_n, at_once = min(max(top_n, default=0), vocabulary), rows_at_once(vocabulary)
    parts = []
    for start in range(0, len(targets), at_once):
        rows = slice(start, start + at_once)
        parts.append(log_probs_of(logits_of(rows), targets[rows], max_n))
    if not parts:
        return ()
    log_probs = torch.cat([part.chosen for part in parts])
    if keep is not None:
        keep(log_probs)
    chosen = log_probs.tolist()
    best = torch.cat([part.best for part in parts]).tolist()
    listed = torch.cat([part.listed for part in parts]).tolist()
    return tuple(
        Score(log_prob, dict(zip(row_ids[:n], row_values[:n], strict=True)))
        for log_prob, row_ids, row_values, n in zip(chosen, best, listed, top_n, strict=True)
    )


class SamplerNeeds(NamedTuple):
    """Sampling features that a step needs, over all its rows.

    Attributes:
        is_processed: True if a row has logits processors.
        has_mask: True if a row has structured output; `is_processed` is then set, too.
        is_drawn: True if a row is not greedy.
        is_scored: True if a row requests log-probs.
    """

    is_processed: bool
    has_mask: bool
    is_drawn: bool
    is_scored: bool


def sampler_needs_of(rows: Sequence[Sampling | None]) -> SamplerNeeds:
    """Return the sampling features that the rows need together; None for padding rows."""
    asked = [one for one in rows if one is not None]
    return SamplerNeeds(
        is_processed=any(map(needs_processing, asked)),
        has_mask=any(map(needs_mask, asked)),
        is_drawn=any(one.uniform is not None for one in asked),
        is_scored=any(one.top_n is not None for one in asked),
    )


@lru_cache(maxsize=1024)
def sampling_layout(rows: int) -> Layout:
    """Return the layout of the sampling options of R rows."""
    fractions = frozenset(name for name, neutral in GREEDY.items() if isinstance(neutral, float))
    return Layout(dict.fromkeys(GREEDY, (rows,)), fractions)


def write_sampling_options(rows: Sequence[Sampling | None], arrays: Mapping[str, np.ndarray]) -> None:
    """Write the sampling options of each row; `uniform` is negative for greedy rows and rows without a token.

    A row with temperature 0 has no other options. A row with `top_k` 1 is greedy, too, and has all its options, which
    its processed log-prob needs.
    """
    asked = [None if one is None or one.temperature == 0 else one for one in rows]
    for name, neutral in GREEDY.items():
        values = [None if one is None else getattr(one, name) for one in asked]
        arrays[name][:] = [neutral if value is None else value for value in values]


@dataclass(frozen=True)
class SamplerInput:
    """Inputs of the sampler on the device, for m rows.

    Attributes:
        options: Sampling options of the rows; None if all of them are greedy.
        processors: Logits processors to apply.
        logits_parts: Inputs of the processors, see `logits_layout`.
        processed: Rows to process, which the inputs describe; None for all rows.
    """

    options: SamplingMetadata | None
    processors: Sequence[LogitsProcessor] = ()
    logits_parts: Mapping[str, Tensor] | None = None
    processed: np.ndarray | None = None


def sample(logits: Tensor, inputs: SamplerInput) -> Tensor:
    """Return the token of each row: [m, V] -> [m]. Logits are left as they are; only processed rows are copied."""
    if not inputs.processors:
        return _sample_rows(logits, inputs.options)
    values, index = _process(logits, inputs)
    if inputs.processed is None or index is None:
        return _sample_rows(values, inputs.options)
    options = None if inputs.options is None else inputs.options.select(inputs.processed)
    return _sample_rows(logits, inputs.options).index_copy(0, index, _sample_rows(values, options))


def _process(logits: Tensor, inputs: SamplerInput) -> tuple[Tensor, Tensor | None]:
    """Return the processed rows, fp32, and their numbers; None if they are all rows."""
    assert inputs.logits_parts is not None, "processors have inputs"
    if inputs.processed is None:
        return process_logits(logits, inputs.logits_parts, inputs.processors), None
    index = to_device(torch.from_numpy(inputs.processed), logits.device)
    return process_logits(logits.index_select(0, index), inputs.logits_parts, inputs.processors), index


def processed_logits(logits: Tensor, tokens: Tensor, inputs: SamplerInput) -> Tensor:
    """Return logits of the distributions that the rows' tokens were drawn from: [m, V] -> [m, V] fp32.

    Args:
        logits: The model's logits, [m, V] of any type.
        tokens: The sampled tokens, [m] int64.
        inputs: Inputs of the sampler, with sampling options; see `eager_sampler_input`.
    """
    assert inputs.options is not None, "greedy rows have options here, too"
    values, options = logits, inputs.options
    if inputs.processors:
        some, index = _process(logits, inputs)
        values = some if index is None else logits.float().index_copy(0, index, some)
    at_once = _sorted_at_once(logits.shape[1])
    pieces = [slice(start, start + at_once) for start in range(0, len(logits), at_once)]
    return torch.cat([filtered_logits(values[rows], options.select(rows), tokens[rows]) for rows in pieces])


def eager_processed_logits(logits: Tensor, tokens: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Return `processed_logits` of an eager step's rows."""
    inputs = eager_sampler_input(rows, logits.shape[1], logits.device, has_options=True)
    return processed_logits(logits, tokens, inputs)


def _sorted_at_once(vocabulary: int) -> int:
    return max(1, rows_at_once(vocabulary) // _DRAWN)


def _sample_rows(logits: Tensor, options: SamplingMetadata | None) -> Tensor:
    if options is None:
        return greedy_tokens(logits)
    return sample_tokens(logits, options, _sorted_at_once(logits.shape[1]))


def eager_sampler_input(
    rows: Sequence[Sampling], words: int, device: torch.device, *, has_options: bool = False
) -> SamplerInput:
    """Return the sampler's input for rows of a step, in one copy.

    Args:
        rows: Sampling options of the rows.
        words: V.
        device: Device of the logits.
        has_options: Whether greedy rows alone have sampling options, too, as scoring needs.
    """
    has_options = has_options or any(one.uniform is not None for one in rows)
    processed = [i for i, one in enumerate(rows) if needs_processing(one)]
    asked = [rows[i] for i in processed]
    parts = [sampling_layout(len(rows))] if has_options else []
    if asked:
        has_mask = any(map(needs_mask, asked))
        parts.append(logits_layout(len(asked), entry_counts(asked, words), words, has_mask=has_mask))
    if not parts:
        return SamplerInput(None)
    layout = parts[0] if len(parts) == 1 else parts[0] | parts[1]
    whole = torch.empty(layout.count, dtype=torch.int64)
    arrays = {name: one.numpy() for name, one in layout.parts(whole).items()}
    if has_options:
        write_sampling_options(rows, arrays)
    processors = asked_processors(arrays, write_logits_inputs(asked, words, arrays)) if asked else ()
    staged = layout.parts(to_device(whole, device))
    host = {name: arrays[name] for name in GREEDY} if has_options else None
    return SamplerInput(
        SamplingMetadata.of(staged, host) if has_options else None,
        processors,
        staged,
        None if len(asked) == len(rows) else np.asarray(processed),
    )
