"""Captured sampling: the graphs of a bucket that turn static logits into tokens and log-probs after its forward.

Logits processors work on a copy, so log-probs are those of the model. A step replays one of six sampling graphs, and
the scoring graph only if a row requests log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from torch import Tensor

from megatron_ext.ops.sampling.graph_logits_processors import process_logits
from megatron_ext.ops.sampling.graph_sampling import best_tokens_of, draw_tokens
from megatron_ext.ops.sampling.log_probs import log_probs_of
from megatron_ext.runner.cuda_graphs.graph_capture import Capture, Program
from megatron_ext.runner.cuda_graphs.input_batch import sampling_metadata_of
from megatron_ext.runner.cuda_graphs.logits_buffers import logits_metadata_of, needs_logits_processing
from megatron_ext.runner.cuda_graphs.structured_output_masks import masks_of, needs_structured_output
from megatron_ext.runner.scoring import rows_at_once
from megatron_ext.scheduling.step import Sampling, ScheduledChunk

Parts = Mapping[str, Tensor]
_DRAWN: Final = 4  # times the memory of scoring a row, for rows that are sorted and weighed in fp64


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


def samplings_of(chunks: Sequence[ScheduledChunk]) -> list[Sampling]:
    """Return the sampling options of the chunks that yield a token."""
    return [chunk.sampling for chunk in chunks if chunk.sampling is not None]


def sampler_needs_of(samplings: Sequence[Sampling]) -> SamplerNeeds:
    """Return the sampling features that the rows need together."""
    return SamplerNeeds(
        is_processed=needs_logits_processing(samplings),
        has_mask=any(map(needs_structured_output, samplings)),
        is_drawn=any(one.uniform is not None for one in samplings),
        is_scored=any(one.top_n is not None for one in samplings),
    )


class GraphSampler:
    """Sampling graphs of a bucket: read its logits and write its output.

    Args:
        graphs: Captures the graphs.
        logits: Static logits buffer, [R, V].
        parts: Inputs that were sent to the device, the logits metadata among them.
        answer: Output tensors by the names of `output_layout`.
    """

    def __init__(self, graphs: Capture, logits: Tensor, parts: Parts, answer: Parts) -> None:
        shapes = ((False, False), (True, False), (True, True))
        self._choose: dict[tuple[bool, bool, bool], Program] = {
            (*kind, is_drawn): graphs.capture(partial(_choose, *kind, is_drawn, logits, parts, answer["tokens"]))
            for kind in shapes
            for is_drawn in (False, True)
        }
        self._score: Program = graphs.capture(partial(_score, logits, answer))

    def run(self, needs: SamplerNeeds) -> None:
        """Sample the tokens, and score them if a row requests log-probs."""
        self._choose[needs.is_processed, needs.has_mask, needs.is_drawn]()
        if needs.is_scored:
            self._score()


def _choose(is_processed: bool, has_mask: bool, is_drawn: bool, logits: Tensor, parts: Parts, tokens: Tensor) -> None:
    values = logits
    if is_processed:
        values = process_logits(logits, logits_metadata_of(parts), masks_of(parts) if has_mask else None)
    together = max(1, rows_at_once(logits.shape[1]) // _DRAWN)
    tokens.copy_(draw_tokens(values, sampling_metadata_of(parts), together) if is_drawn else best_tokens_of(values))


def _score(logits: Tensor, answer: Parts) -> None:
    """Score a few rows at a time, so that memory does not grow with the number of rows."""
    listed, at_once = answer["best"].shape[1], rows_at_once(logits.shape[1])
    for start in range(0, len(logits), at_once):
        rows = slice(start, start + at_once)
        found = log_probs_of(logits[rows], answer["tokens"][rows], listed)
        answer["log_probs"][rows].copy_(found.chosen)
        answer["best"][rows].copy_(found.best)
        answer["best_log_probs"][rows].copy_(found.listed)
