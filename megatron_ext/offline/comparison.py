"""Comparison of the same prompts with the cache off and on: `--prefix-cache-compare`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.offline.console_report import first_and_last
from megatron_ext.offline.prompts import Prompt
from megatron_ext.scheduling.record import RequestRecord, Status

FP32_TOLERANCE = 1e-3  # absolute difference of a log-prob
P95_TOLERANCE, MAX_TOLERANCE = math.log(1.05), math.log(1.2)  # in 16 bits, over all log-probs of a run
_SHOWN = 10  # requests that differ
TIE = 1e-4  # two best log-probs closer than this may come in either order


@dataclass(frozen=True)
class Difference:
    """Difference of one request with the cache off and on."""

    off: RequestRecord
    on: RequestRecord
    first_token: int | None  # index of the first generated token that differs without a tie
    log_probs: tuple[float, ...]  # absolute differences, up to the first differing token

    @property
    def largest(self) -> float:
        """Largest difference of a log-prob."""
        return max(self.log_probs, default=0.0)

    @property
    def is_tie(self) -> bool:
        """True if the tokens first differ at a tie; the texts after it are not compared."""
        return self.first_token is None and self.off.generated_tokens != self.on.generated_tokens


def comparable(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with log-probs of generated tokens and of the runner-up, which a comparison needs.

    Raises:
        ConfigError: A prompt is sampled: rounding alone may change its tokens between two runs.
    """
    for prompt in prompts:
        if not prompt.params.is_greedy:
            raise ConfigError(
                f"{prompt.source}: --prefix-cache-compare needs greedy requests, and this one has temperature "
                f"{prompt.params.temperature:g}; give temperature 0 or top_k 1"
            )
    return [dataclasses.replace(prompt, params=_scored(prompt.params)) for prompt in prompts]


def _scored(params: RequestParams) -> RequestParams:
    """Return the params with temperature 0: after top_k 1 processed log-probs would have no runner-up."""
    return dataclasses.replace(
        params,
        temperature=0.0,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        top_n_logprobs=max(2, params.top_n_logprobs),
    )


def compare(off: Sequence[RequestRecord], on: Sequence[RequestRecord]) -> list[Difference]:
    """Compare request by request, in order of submission."""
    return [_compare_request(one, other) for one, other in zip(off, on, strict=True)]


def _compare_request(off: RequestRecord, on: RequestRecord) -> Difference:
    pairs = list(zip(off.generated_tokens, on.generated_tokens, strict=False))
    same = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
    log_probs = [(record.generated_log_probs or ())[:same] for record in (off, on)]
    gaps = tuple(abs(one - other) for one, other in zip(*log_probs, strict=True))
    is_equal = off.generated_tokens == on.generated_tokens and off.status is on.status
    if is_equal or (same < len(pairs) and _is_tie(off, same, on.generated_tokens[same])):
        return Difference(off, on, None, gaps)
    return Difference(off, on, same, gaps)


def _is_tie(record: RequestRecord, index: int, other: int) -> bool:
    """Return whether `other` ties with the chosen token."""
    assert record.generated_top_n_log_probs is not None, "a comparison asks for them"
    scores = record.generated_top_n_log_probs[index]
    return max(scores.values()) - scores.get(other, -math.inf) < TIE


def problems(differences: Sequence[Difference], dtype: torch.dtype) -> list[str]:
    """Return the reasons for a failed comparison, a line each; empty if the cache skipped tokens and changed none."""
    found = [
        f"request {record.request_id} did not complete with the cache {name}: {record.error}"
        for one in differences
        for name, record in (("off", one.off), ("on", one.on))
        if record.status is not Status.COMPLETED
    ]
    different = [one for one in differences if one.first_token is not None]
    if different:
        found.append(f"{len(different)} of {len(differences)} requests have different tokens")
    found += _log_prob_problems([gap for one in differences for gap in one.log_probs], dtype)
    if not any(one.on.skipped_prefill_token_count for one in differences):
        found.append("the cached run skipped no tokens, so the comparison proves nothing")
    return found


def _log_prob_problems(gaps: list[float], dtype: torch.dtype) -> Iterator[str]:
    if any(math.isnan(gap) for gap in gaps):
        yield "log-probs are NaN"
    elif dtype is torch.float32:
        if max(gaps, default=0.0) > FP32_TOLERANCE:
            yield f"log-probs differ by up to {max(gaps):.2e}, more than {FP32_TOLERANCE:g}"
    elif gaps:
        p95, largest = _percentile_95(gaps), max(gaps)
        if p95 > P95_TOLERANCE or largest > MAX_TOLERANCE:
            yield (
                f"log-probs differ by {p95:.3f} (95th percentile) and {largest:.3f} (largest), "
                f"more than {P95_TOLERANCE:.3f} and {MAX_TOLERANCE:.3f}"
            )


def _percentile_95(gaps: Sequence[float]) -> float:
    return sorted(gaps)[math.ceil(0.95 * len(gaps)) - 1]


def verdict(differences: Sequence[Difference], dtype: torch.dtype) -> list[str]:
    """Return the lines of a successful comparison: its extent and its limits."""
    gaps = [gap for one in differences for gap in one.log_probs]
    name = str(dtype).removeprefix("torch.")
    tokens = f"{_count(len(differences), 'request')} compared, off and on: {_count(len(gaps), 'token')} equal"
    ties = sum(one.is_tie for one in differences)
    if ties:
        tokens += f"; {_count(ties, 'request')} diverged at a tie of two tokens"
    largest = max(gaps, default=0.0)
    if dtype is torch.float32:
        limits = [f"log-probs in {name}: the largest difference is {largest:.1e}, limit {FP32_TOLERANCE:g}"]
    else:
        p95 = _percentile_95(gaps) if gaps else 0.0
        limits = [
            f"log-probs in {name}: 95th percentile of the differences {p95:.1e}, limit {P95_TOLERANCE:.3f} (ln 1.05);",
            f"the largest difference is {largest:.1e}, limit {MAX_TOLERANCE:.3f} (ln 1.2)",
        ]
    return [tokens, *limits, "the cache changes nothing else"]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_comparison(
    differences: Sequence[Difference], found: Sequence[str], dtype: torch.dtype, console: Console
) -> None:
    """Print a table of the requests that differ, else of the first and last few, then the verdict.

    Args:
        found: Result of `problems`.
    """
    differing = [one for one in differences if one.first_token is not None]
    first, _, last = (differing[:_SHOWN], (), ()) if differing else first_and_last(differences)
    table = Table("id", "prompt", "skipped", "tokens", "largest log-prob difference", title="cache off and on")
    for one in (*first, *last):
        tokens = "equal" if one.first_token is None else f"differ from the {one.first_token + 1}. on"
        if one.is_tie:
            tokens = f"equal up to a tie, {len(one.log_probs)} of them"
        skipped = str(one.on.skipped_prefill_token_count)
        table.add_row(str(one.on.request_id), str(one.on.prompt_token_count), skipped, tokens, f"{one.largest:.1e}")
    console.print(table)
    hidden = len(differences) - len(first) - len(last)
    if hidden:
        what = "the first and last are shown" if last else "the first differing requests are shown"
        console.print(f"{_count(hidden, 'request')} left out; {what}", markup=False, soft_wrap=True)
    for line in found or verdict(differences, dtype):
        console.print(line, markup=False, soft_wrap=True)
