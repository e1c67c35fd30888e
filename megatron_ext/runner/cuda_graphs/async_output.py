"""Output of a launched step: a sampled token per row and, if requested, its log-prob and the best tokens.

The tokens come first, so a step without log-probs copies nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_ext.engine.result import Score, StepResult
from megatron_ext.runner.cuda_graphs.buckets import MAX_LISTED
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput
from megatron_ext.runner.layout import Layout
from megatron_ext.scheduling.step import Sampling


def output_layout(rows: int, vocabulary: int) -> Layout:
    """Return the layout of every output that a step of `rows` rows can have."""
    listed = (rows, min(MAX_LISTED, vocabulary))
    shapes = {"tokens": (rows,), "log_probs": (rows,), "best": listed, "best_log_probs": listed}
    return Layout(shapes, frozenset({"log_probs", "best_log_probs"}))


class Launched:
    """Launched step that the device may still be computing; the copy of its output to the host is enqueued.

    Args:
        outputs: Source of the copy.
        layout: Layout of the output.
        rows: Request and sampling options of each row; no options for a row that yields no token.
        is_scored: Whether a row requests log-probs.
        graph_rows: See `StepResult`.
    """

    def __init__(
        self,
        outputs: AsyncModelOutput,
        layout: Layout,
        rows: Sequence[tuple[int, Sampling | None]],
        *,
        is_scored: bool,
        graph_rows: int | None = None,
    ) -> None:
        self._read, self._layout = outputs.fetch(layout.count if is_scored else len(rows)), layout
        self._top_n = [(name, row, one.top_n) for row, (name, one) in enumerate(rows) if one is not None]
        self._graph_rows = graph_rows

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Request id and row of each sampled token."""
        return [(name, row) for name, row, _ in self._top_n]

    def result(self) -> StepResult:
        """Wait for the tokens of the step and return its result."""
        numbers = self._read()
        tokens = numbers[: self._layout.shapes["tokens"][0]].tolist()
        scored = [one for one in self._top_n if one[2] is not None]
        scores = _scores(self._layout.parts(numbers), scored) if scored else {}
        return StepResult({name: tokens[row] for name, row in self.rows}, scores, graph_rows=self._graph_rows)


def _scores(parts: dict[str, Tensor], scored: Sequence[tuple[int, int, int | None]]) -> dict[int, Score]:
    chosen = parts["log_probs"].tolist()
    found = {}
    for name, row, top_n in scored:
        ids, log_probs = (parts[part][row, :top_n].tolist() for part in ("best", "best_log_probs"))
        found[name] = Score(chosen[row], dict(zip(ids, log_probs, strict=True)))
    return found
