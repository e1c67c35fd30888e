"""Logits processors of the eager runner, for all rows together; see docs/sampling.md for their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_ext.ops.sampling.logits_processors import (
    CameBefore,
    add_biases,
    drop_improbable,
    forbid,
    keep_allowed,
    penalize,
    rule_out,
)
from megatron_ext.ops.step_metadata import to_device
from megatron_ext.runner.model_input import SamplingRow
from megatron_ext.scheduling.logits_options import LogitsOptions


def process_logits(values: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply each row's logits processors. A row's result depends on that row alone.

    Args:
        values: Logits, [r, V] fp32; modified.
        rows: Sampling rows of the logits; each has a `LogitsOptions`.
    """
    metadata = [_row_metadata(row) for row in rows]
    _penalize(values, metadata)
    _add_biases(values, metadata)
    _keep_allowed(values, metadata)
    _rule_out(values, metadata)
    _forbid(values, rows)
    _drop_improbable(values, rows, metadata)


def _row_metadata(row: SamplingRow) -> LogitsOptions:
    assert row.sampling.logits_options is not None, "only rows that ask are shaped"
    return row.sampling.logits_options


def _penalize(values: Tensor, metadata: Sequence[LogitsOptions]) -> None:
    asked = [i for i, row_metadata in enumerate(metadata) if row_metadata.has_penalties]
    if not asked:
        return
    counted = [_count(metadata[i]) for i in asked]
    rows = np.repeat(asked, [len(tokens) for tokens, _ in counted])
    tokens, counts = (np.concatenate(parts) for parts in zip(*counted, strict=True))
    factors = [[row_metadata.repetition, row_metadata.presence, row_metadata.frequency] for row_metadata in metadata]
    before = CameBefore(*(to_device(torch.from_numpy(one), values.device) for one in (rows, tokens, counts)))
    penalize(values, before, *to_device(torch.tensor(factors, dtype=torch.float32), values.device).unbind(1))


def _count(row_metadata: LogitsOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct tokens of a sequence and how often each was generated."""
    came = np.asarray(row_metadata.tokens, dtype=np.int64)
    generated = np.bincount(came[row_metadata.prompt_length :], minlength=1 + int(came.max()))
    tokens = np.flatnonzero(np.bincount(came))
    return tokens, generated[tokens].astype(np.float32)


def _add_biases(values: Tensor, metadata: Sequence[LogitsOptions]) -> None:
    entries = [(i, token, bias) for i, row_metadata in enumerate(metadata) for token, bias in row_metadata.biases]
    if entries:
        rows, tokens, biases = zip(*entries, strict=True)
        add_biases(values, *_places(rows, tokens, values), to_device(torch.tensor(biases), values.device))


def _keep_allowed(values: Tensor, metadata: Sequence[LogitsOptions]) -> None:
    masks = [
        (i, np.frombuffer(row_metadata.allowed, np.int32))
        for i, row_metadata in enumerate(metadata)
        if row_metadata.allowed is not None
    ]
    if masks:
        rows, numbers = zip(*masks, strict=True)
        stacked = torch.from_numpy(np.stack(numbers))
        keep_allowed(values, to_device(torch.tensor(rows), values.device), to_device(stacked, values.device))


def _rule_out(values: Tensor, metadata: Sequence[LogitsOptions]) -> None:
    entries = [(i, token) for i, row_metadata in enumerate(metadata) for token in row_metadata.ruled_out]
    if entries:
        rows, tokens = zip(*entries, strict=True)
        rule_out(values, *_places(rows, tokens, values))


def _forbid(values: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Forbid tokens before `min_p`, whose threshold depends on the best token: a forbidden token may be the best."""
    words = values.shape[1]
    entries = [(i, token) for i, row in enumerate(rows) for token in row.sampling.forbidden if 0 <= token < words]
    if entries:
        chosen, tokens = zip(*entries, strict=True)
        forbid(values, *_places(chosen, tokens, values))


def _drop_improbable(values: Tensor, rows: Sequence[SamplingRow], metadata: Sequence[LogitsOptions]) -> None:
    if not any(row_metadata.min_p for row_metadata in metadata):
        return
    temperature = torch.tensor([row.sampling.temperature or 1.0 for row in rows], dtype=torch.float64)
    min_p = torch.tensor([row_metadata.min_p for row_metadata in metadata], dtype=torch.float64)
    drop_improbable(values, to_device(temperature, values.device), to_device(min_p, values.device))


def _places(rows: Sequence[int], tokens: Sequence[int], values: Tensor) -> tuple[Tensor, Tensor]:
    index = to_device(torch.tensor([rows, tokens]), values.device)
    return index[0], index[1]
