"""Logits as requests want them shaped, rows together; see docs/sampling.md for the order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_ext.mcore.staging import SamplingRow
from megatron_ext.ops.sampling.shaping import (
    CameBefore,
    add_biases,
    drop_improbable,
    forbid,
    keep_allowed,
    penalize,
    rule_out,
)
from megatron_ext.ops.transfer import to_device
from megatron_ext.scheduling.shaping import Shaping


def shape_logits(values: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Do what the rows want with their logits. A row depends on nothing but that row.

    Args:
        values: Logits, [r, V] fp32; modified.
        rows: Of the logits; each has a `Shaping`.
    """
    wishes = [_wish(row) for row in rows]
    _penalize(values, wishes)
    _add_biases(values, wishes)
    _keep_allowed(values, wishes)
    _rule_out(values, wishes)
    _forbid(values, rows)
    _drop_improbable(values, rows, wishes)


def _wish(row: SamplingRow) -> Shaping:
    assert row.sampling.shaping is not None, "only rows that ask are shaped"
    return row.sampling.shaping


def _penalize(values: Tensor, wishes: Sequence[Shaping]) -> None:
    asked = [i for i, wish in enumerate(wishes) if wish.has_penalties]
    if not asked:
        return
    counted = [_count(wishes[i]) for i in asked]
    rows = np.repeat(asked, [len(tokens) for tokens, _ in counted])
    tokens, counts = (np.concatenate(parts) for parts in zip(*counted, strict=True))
    factors = [[wish.repetition, wish.presence, wish.frequency] for wish in wishes]
    before = CameBefore(*(to_device(torch.from_numpy(one), values.device) for one in (rows, tokens, counts)))
    penalize(values, before, *to_device(torch.tensor(factors, dtype=torch.float32), values.device).unbind(1))


def _count(wish: Shaping) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a sequence, each once, and how often each was generated."""
    came = np.asarray(wish.tokens, dtype=np.int64)
    generated = np.bincount(came[wish.prompt_length :], minlength=1 + int(came.max()))
    tokens = np.flatnonzero(np.bincount(came))
    return tokens, generated[tokens].astype(np.float32)


def _add_biases(values: Tensor, wishes: Sequence[Shaping]) -> None:
    entries = [(i, token, bias) for i, wish in enumerate(wishes) for token, bias in wish.biases]
    if entries:
        rows, tokens, biases = zip(*entries, strict=True)
        add_biases(values, *_places(rows, tokens, values), to_device(torch.tensor(biases), values.device))


def _keep_allowed(values: Tensor, wishes: Sequence[Shaping]) -> None:
    masks = [(i, np.frombuffer(wish.allowed, np.int32)) for i, wish in enumerate(wishes) if wish.allowed is not None]
    if masks:
        rows, numbers = zip(*masks, strict=True)
        stacked = torch.from_numpy(np.stack(numbers))
        keep_allowed(values, to_device(torch.tensor(rows), values.device), to_device(stacked, values.device))


def _rule_out(values: Tensor, wishes: Sequence[Shaping]) -> None:
    entries = [(i, token) for i, wish in enumerate(wishes) for token in wish.ruled_out]
    if entries:
        rows, tokens = zip(*entries, strict=True)
        rule_out(values, *_places(rows, tokens, values))


def _forbid(values: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Tokens that must not come yet, before shares of the best one's probability are taken: it may be one of them."""
    words = values.shape[1]
    entries = [(i, token) for i, row in enumerate(rows) for token in row.sampling.forbidden if 0 <= token < words]
    if entries:
        chosen, tokens = zip(*entries, strict=True)
        forbid(values, *_places(chosen, tokens, values))


def _drop_improbable(values: Tensor, rows: Sequence[SamplingRow], wishes: Sequence[Shaping]) -> None:
    if not any(wish.min_p for wish in wishes):
        return
    temperature = torch.tensor([row.sampling.temperature or 1.0 for row in rows], dtype=torch.float64)
    min_p = torch.tensor([wish.min_p for wish in wishes], dtype=torch.float64)
    drop_improbable(values, to_device(temperature, values.device), to_device(min_p, values.device))


def _places(rows: Sequence[int], tokens: Sequence[int], values: Tensor) -> tuple[Tensor, Tensor]:
    index = to_device(torch.tensor([rows, tokens]), values.device)
    return index[0], index[1]
