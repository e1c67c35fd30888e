"""Progress bar in tokens: prefilled, skipped and generated."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megatron_ext.engine.result import StepOutput
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request

_WINDOW = 5.0  # seconds over which rates are measured
_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {remaining} left{postfix}"


class Tokens(NamedTuple):
    """Progress of requests, in tokens."""

    computed: int = 0  # prompt tokens, not counting recomputation
    recomputed: int = 0
    skipped: int = 0
    generated: int = 0

    @property
    def done(self) -> int:
        """Tokens that count as progress."""
        return self.computed + self.skipped + self.generated


class Progress:
    """Progress of all requests of a run.

    Args:
        expected: Maximum number of tokens of each request, by id: its prompt and its generation limit.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._finished = Tokens()
        self._living: dict[int, Tokens] = {}
        self._seen: deque[tuple[float, Tokens]] = deque([(time.monotonic(), Tokens())])
        self.total = sum(expected)  # shrinks when a request ends early
        self.ended = 0

    @property
    def done(self) -> int:
        """Tokens of all requests that count as progress."""
        return self._seen[-1][1].done

    def update(self, step: StepOutput) -> None:
        """Add the output of a step."""
        for request in step.active:
            self._living[request.request_id] = _of_request(request)
        for record in step.records:
            self._living.pop(record.request_id, None)
            done = _of_record(record)
            self._finished = _total(self._finished, done)
            self.total += done.done - self._expected[record.request_id]
            self.ended += 1
        now = time.monotonic()
        self._seen.append((now, _total(self._finished, *self._living.values())))
        while len(self._seen) > 2 and self._seen[1][0] < now - _WINDOW:
            self._seen.popleft()

    def summary(self) -> str:
        """Return ended requests, both rates over the last seconds, and the share of skipped prompt tokens."""
        (then, before), (now, tokens) = self._seen[0], self._seen[-1]
        seconds = max(now - then, 1e-9)
        prefilled = tokens.computed + tokens.recomputed - before.computed - before.recomputed
        generated = tokens.generated - before.generated
        share = tokens.skipped / max(1, tokens.skipped + tokens.computed)
        rates = f"prefill {_rate(prefilled / seconds)}, decode {_rate(generated / seconds)} tok/s"
        return f"{self.ended}/{len(self._expected)}, {rates}, {share:.0%} skipped"


def _total(*tokens: Tokens) -> Tokens:
    return Tokens(*map(sum, zip(*tokens, strict=True)))


def _of_request(request: Request) -> Tokens:
    ledger = request.ledger
    return Tokens(ledger.computed, ledger.recomputed, ledger.skipped, request.generated_count)


def _of_record(record: RequestRecord) -> Tokens:
    computed, recomputed = record.computed_prefill_token_count, record.recomputed_token_count
    return Tokens(computed, recomputed, record.skipped_prefill_token_count, len(record.generated_tokens))


def _rate(tokens: float) -> str:
    return tqdm.format_sizeof(tokens) if tokens >= 1000 else f"{tokens:.0f}"


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
        )

    def update(self, step: StepOutput) -> None:
        """Add the output of a step; see `Progress.update`."""
        if self._bar.disable:
            return
        self._progress.update(step)
        self._bar.total = max(1, self._progress.total)
        self._bar.set_postfix_str(self._progress.summary(), refresh=False)
        self._bar.update(self._progress.done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


@contextmanager
def progress_bar(expected: Sequence[int]) -> Iterator[Bar]:
    """Show a bar for requests with these maximum token counts, by id: prompt and generation limit."""
    with closing(Bar(expected)) as bar, logging_redirect_tqdm():
        yield bar
