"""Captured sampling: the graphs of a bucket that turn static logits into tokens and log-probs after its forward.

Logits processors work on a copy, so raw log-probs come from the model's own logits. A step replays one of six sampling
graphs, and a scoring graph only if a row requests log-probs: the same for all steps, or for processed log-probs one of
three.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from megatron_ext.ops.sampling import SamplingMetadata
from megatron_ext.ops.sampling.log_probs import log_probs_of
from megatron_ext.runner.cuda_graphs.graph_capture import Capture, Graph
from megatron_ext.runner.logits_processors import PROCESSORS, LogitsProcessor
from megatron_ext.runner.sampler import SamplerInput, SamplerNeeds, processed_logits, rows_at_once, sample

Parts = Mapping[str, Tensor]


class GraphSampler:
    """Sampling graphs of a bucket: read its logits and write its output.

    Args:
        graphs: Captures the graphs.
        logits: Static logits buffer, [R, V].
        parts: Inputs that were sent to the device, the logits metadata among them.
        answer: Output tensors by the names of `output_layout`.
        has_processed_log_probs: Whether log-probs are of the distributions that the tokens were drawn from; else of the
            model's logits.
    """

    def __init__(
        self, graphs: Capture, logits: Tensor, parts: Parts, answer: Parts, *, has_processed_log_probs: bool = False
    ) -> None:
        shapes = ((False, False), (True, False), (True, True))
        self._choose: dict[tuple[bool, bool, bool], Graph] = {
            (*kind, is_drawn): graphs.capture(partial(_choose, *kind, is_drawn, logits, parts, answer["tokens"]))
            for kind in shapes
            for is_drawn in (False, True)
        }
        self._score: dict[tuple[bool, bool], Graph] = (
            {kind: graphs.capture(partial(_score_processed, *kind, logits, parts, answer)) for kind in shapes}
            if has_processed_log_probs
            else dict.fromkeys(shapes, graphs.capture(partial(score, logits, answer)))
        )

    def run(self, needs: SamplerNeeds) -> None:
        """Sample the tokens, and score them if a row requests log-probs."""
        self._choose[needs.is_processed, needs.has_mask, needs.is_drawn]()
        if needs.is_scored:
            self._score[needs.is_processed, needs.has_mask]()


def _choose(is_processed: bool, has_mask: bool, is_drawn: bool, logits: Tensor, parts: Parts, tokens: Tensor) -> None:
    options = SamplingMetadata.of(parts) if is_drawn else None
    tokens.copy_(sample(logits, SamplerInput(options, _processors(is_processed, has_mask), parts)))


def _score_processed(is_processed: bool, has_mask: bool, logits: Tensor, parts: Parts, answer: Parts) -> None:
    inputs = SamplerInput(SamplingMetadata.of(parts), _processors(is_processed, has_mask), parts)
    score(processed_logits(logits, answer["tokens"], inputs), answer)


def _processors(is_processed: bool, has_mask: bool) -> list[LogitsProcessor]:
    return [one for one in PROCESSORS if has_mask or not one.has_mask] if is_processed else []


def score(logits: Tensor, answer: Parts) -> None:
    """Score the rows' tokens, a few rows at a time, so that memory does not grow with their number.

    Args:
        logits: [R, V].
        answer: Output tensors by the names of `output_layout`; the tokens are read, the others written.
    """
    listed, at_once = answer["best"].shape[1], rows_at_once(logits.shape[1])
    for start in range(0, len(logits), at_once):
        rows = slice(start, start + at_once)
        found = log_probs_of(logits[rows], answer["tokens"][rows], listed)
        answer["log_probs"][rows].copy_(found.chosen)
        answer["best"][rows].copy_(found.best)
        answer["best_log_probs"][rows].copy_(found.listed)
