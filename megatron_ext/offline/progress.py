"""Progress bar in tokens: prefilled, skipped and generated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megatron_ext.engine.result import StepOutput

_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {remaining} left, {rate_noinv_fmt}{postfix}"


class Tokens(NamedTuple):
    """Progress of requests, in tokens."""

    computed: int = 0  # prompt tokens, not counting recomputation
    skipped: int = 0
    generated: int = 0


class Progress:
    """Progress of all requests of a run.

    Args:
        expected: Maximum number of tokens of each request, by id: its prompt and its generation limit.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._finished = Tokens()
        self._living: dict[int, Tokens] = {}
        self.tokens = Tokens()  # of all requests
        self.total = sum(expected)  # shrinks when a request ends early
        self.ended = 0

    def update(self, step: StepOutput) -> None:
        """Add the output of a step."""
        for request in step.active:
            ledger = request.ledger
            self._living[request.request_id] = Tokens(ledger.computed, ledger.skipped, request.generated_count)
        for record in step.records:
            self._living.pop(record.request_id, None)
            computed, skipped = record.computed_prefill_token_count, record.skipped_prefill_token_count
            done = Tokens(computed, skipped, len(record.generated_tokens))
            self._finished = _total(self._finished, done)
            self.total += sum(done) - self._expected[record.request_id]
            self.ended += 1
        self.tokens = _total(self._finished, *self._living.values())

    def summary(self) -> str:
        """Return the number of ended requests, and the share of skipped prompt tokens."""
        share = self.tokens.skipped / max(1, self.tokens.skipped + self.tokens.computed)
        return f"{self.ended}/{len(self._expected)}, {share:.0%} skipped"


def _total(*tokens: Tokens) -> Tokens:
    return Tokens(*map(sum, zip(*tokens, strict=True)))


class Bar:
    """Progress bar on standard error; hidden if that is not a terminal. Log lines appear above it."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._progress = Progress(expected)
        visible = sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=max(1, self._progress.total),
            bar_format=_FORMAT,
            disable=not visible,
            leave=False,
            dynamic_ncols=True,
            unit=" tokens",
            unit_scale=True,
        )

    def update(self, step: StepOutput) -> None:
        """Add the output of a step; see `Progress.update`."""
        if self._bar.disable:
            return
        self._progress.update(step)
        self._bar.total = max(1, self._progress.total)
        self._bar.set_postfix_str(self._progress.summary(), refresh=False)
        self._bar.update(sum(self._progress.tokens) - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


@contextmanager
def progress_bar(expected: Sequence[int]) -> Iterator[Bar]:
    """Show a bar for requests with these maximum token counts, by id: prompt and generation limit."""
    with closing(Bar(expected)) as bar, logging_redirect_tqdm():
        yield bar
