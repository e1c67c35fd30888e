"""What a captured step answers: a token a row, and where somebody asks their log-probs and the best ones.

The tokens come first, so that a step of which nothing else is asked copies nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.engine.result import Score, StepResult
from megatron_ext.runner.cuda_graphs.buckets import MAX_LISTED
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput, Layout, PendingOutput
from megatron_ext.scheduling.step import ScheduledChunk


@dataclass(frozen=True)
class OutputRow:
    """A row that somebody waits for: whose it is, and how many of the best tokens are listed; None is no log-prob."""

    request_id: int
    row: int
    top_n: int | None


def output_layout(rows: int, vocabulary: int) -> Layout:
    """Everything that a step of so many rows may be asked."""
    listed = (rows, min(MAX_LISTED, vocabulary))
    shapes = {"tokens": (rows,), "log_probs": (rows,), "best": listed, "best_log_probs": listed}
    return Layout(shapes, frozenset({"log_probs", "best_log_probs"}))


def fetch(
    outputs: AsyncModelOutput,
    layout: Layout,
    chunks: Sequence[ScheduledChunk],
    *,
    is_scored: bool,
) -> Launched:
    """Enqueue the copy of a step's answer to the host.

    Args:
        answers: Where it comes from.
        layout: Of the answer.
        chunks: One a row.
        is_scored: Whether somebody asks for log-probs.
    """
    rows = [
        OutputRow(chunk.request_id, row, chunk.sampling.top_n)
        for row, chunk in enumerate(chunks)
        if chunk.sampling is not None
    ]
    return Launched(outputs.fetch(layout.count if is_scored else len(chunks)), layout, rows)


class Launched:
    """A step that the device may still be computing."""

    def __init__(self, answer: PendingOutput, layout: Layout, rows: Sequence[OutputRow]) -> None:
        self._answer, self._layout, self._asked = answer, layout, rows

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Whose token is in which row."""
        return [(one.request_id, one.row) for one in self._asked]

    def result(self) -> StepResult:
        """Wait for its tokens."""
        numbers = self._answer.read()
        tokens = numbers[: self._layout.shapes["tokens"][0]].tolist()
        asked = [one for one in self._asked if one.top_n is not None]
        scores = _scores(self._layout.parts(numbers), asked) if asked else {}
        drawn = {one.request_id: tokens[one.row] for one in self._asked}
        return StepResult(drawn, scores, {}, {})


def _scores(parts: dict[str, Tensor], asked: Sequence[OutputRow]) -> dict[int, Score]:
    chosen = parts["log_probs"].tolist()
    found = {}
    for one in asked:
        ids, log_probs = (parts[name][one.row, : one.top_n].tolist() for name in ("best", "best_log_probs"))
        found[one.request_id] = Score(chosen[one.row], dict(zip(ids, log_probs, strict=True)))
    return found
