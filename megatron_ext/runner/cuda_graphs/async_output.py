"""Output of a launched step: a sampled token per row and, if requested, its log-prob and the best tokens.

The tokens come first, so a step without log-probs copies nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.engine.result import Score, StepResult
from megatron_ext.runner.cuda_graphs.buckets import MAX_LISTED
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput, PendingOutput
from megatron_ext.runner.layout import Layout
from megatron_ext.scheduling.step import ScheduledChunk


@dataclass(frozen=True)
class OutputRow:
    """Output row that yields a token: its request, its row and the number of best tokens; None means no log-probs."""

    request_id: int
    row: int
    top_n: int | None


def output_layout(rows: int, vocabulary: int) -> Layout:
    """Return the layout of every output that a step of `rows` rows can have."""
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
    """Enqueue the copy of a captured step's output to the host.

    Args:
        outputs: Source of the copy.
        layout: Layout of the output.
        chunks: One chunk per row.
        is_scored: True if a row requests log-probs.
    """
    rows = [
        OutputRow(chunk.request_id, row, chunk.sampling.top_n)
        for row, chunk in enumerate(chunks)
        if chunk.sampling is not None
    ]
    pending = outputs.fetch(layout.count if is_scored else len(chunks))
    return Launched(pending, layout, rows, graph_rows=len(chunks))


class Launched:
    """Launched step that the device may still be computing.

    Args:
        answer: Output of the step.
        layout: Layout of the output.
        rows: Rows that yield a token.
        graph_rows: See `StepResult`.
    """

    def __init__(
        self, answer: PendingOutput, layout: Layout, rows: Sequence[OutputRow], graph_rows: int | None = None
    ) -> None:
        self._answer, self._layout, self._asked, self._graph_rows = answer, layout, rows, graph_rows

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Request id and row of each sampled token."""
        return [(one.request_id, one.row) for one in self._asked]

    def result(self) -> StepResult:
        """Wait for the tokens of the step and return its result."""
        numbers = self._answer.read()
        tokens = numbers[: self._layout.shapes["tokens"][0]].tolist()
        asked = [one for one in self._asked if one.top_n is not None]
        scores = _scores(self._layout.parts(numbers), asked) if asked else {}
        drawn = {one.request_id: tokens[one.row] for one in self._asked}
        return StepResult(drawn, scores, {}, {}, graph_rows=self._graph_rows)


def _scores(parts: dict[str, Tensor], asked: Sequence[OutputRow]) -> dict[int, Score]:
    chosen = parts["log_probs"].tolist()
    found = {}
    for one in asked:
        ids, log_probs = (parts[name][one.row, : one.top_n].tolist() for name in ("best", "best_log_probs"))
        found[one.request_id] = Score(chosen[one.row], dict(zip(ids, log_probs, strict=True)))
    return found
