"""`--prefix-cache-compare`: what counts as a difference, and that each kind of it ends with exit code 1."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.offline.comparison import comparable, compare, print_comparison, problems
from megatron_ext.offline.prompts import Prompt
from megatron_ext.scheduling.record import RequestRecord, Status

FP32, BF16 = torch.float32, torch.bfloat16


def scored(record, tokens=(7, 8), log_probs=(-0.5, -1.0), runner_up=1.0, skipped=0, **changes) -> RequestRecord:
    """Record with log-probs; the second best token, 9, is `runner_up` nats less likely at each position."""
    return record(
        generated_tokens=tokens,
        generated_log_probs=log_probs,
        generated_top_n_log_probs=tuple(
            {t: score, 9: score - runner_up} for t, score in zip(tokens, log_probs, strict=True)
        ),
        skipped_prefill_token_count=skipped,
        **changes,
    )


def found(off: RequestRecord, on: RequestRecord, dtype: torch.dtype = FP32) -> list[str]:
    return problems(compare([off], [on]), dtype)


def test_equal_runs_have_no_problem(record):
    assert found(scored(record), scored(record, log_probs=(-0.5, -1.0009), skipped=2)) == []


def test_a_run_that_skipped_nothing_shows_nothing(record):
    assert found(scored(record), scored(record)) == [
        "the cached run skipped no tokens, so the comparison proves nothing"
    ]


@pytest.mark.parametrize(("tokens", "first"), [((7, 9), 1), ((7,), 1), ((7, 8, 9), 2)], ids=str)
def test_other_tokens(record, tokens, first):
    on = scored(record, tokens=tokens, log_probs=(-0.5, -1.0, -1.5)[: len(tokens)], skipped=2)
    assert found(scored(record), on) == ["1 of 1 requests have different tokens"]
    (difference,) = compare([scored(record)], [on])
    assert difference.first_token == first


def test_two_best_tokens_may_change_places_where_they_are_as_good(record):
    """Tokens after such a place belong to another text, and are not compared."""
    off = scored(record, runner_up=0.9e-4)
    assert found(off, scored(record, tokens=(9, 3), log_probs=(-0.5, -7.0), skipped=2)) == []
    assert found(scored(record, runner_up=1.1e-4), scored(record, tokens=(9, 8), skipped=2)) != []
    assert found(off, scored(record, tokens=(5, 8), skipped=2)) != [], "the token is neither of the two"


@pytest.mark.parametrize("log_probs", [(-0.5, -1.0011), (-0.4989, -1.0), (math.nan, -1.0)], ids=str)
def test_other_log_probs_in_fp32(record, log_probs):
    (problem,) = found(scored(record), scored(record, log_probs=log_probs, skipped=2))
    assert problem.startswith("log-probs ")


def test_log_probs_in_16_bits(record):
    """The 95th percentile may differ by ln 1.05, the largest by ln 1.2; fp32's tolerance does not apply."""
    tokens, exact = tuple(range(10, 50)), (-2.0,) * 40

    def found_with(*gaps: float) -> list[str]:
        moved = tuple(-2.0 - gap for gap in gaps) + exact[len(gaps) :]
        return found(scored(record, tokens, exact), scored(record, tokens, moved, skipped=2), BF16)

    assert found_with(*[0.048] * 40) == []
    assert found_with(0.18, 0.18) == []  # 2 of 40 are beyond the 95th percentile
    assert found_with(*[0.05] * 3) == [
        "log-probs differ by 0.050 (95th percentile) and 0.050 (largest), more than 0.049 and 0.182"
    ]
    assert found_with(0.19) != []
    assert found(scored(record, (7,), (-0.5,)), scored(record, (7,), (-0.6,), skipped=2), BF16) != [], "a single one"


def test_a_request_that_does_not_complete(record):
    failed = scored(record, status=Status.FAILED, error="no room", skipped=2)
    assert "request 0 did not complete with the cache on: no room" in found(scored(record), failed)
    assert "request 0 did not complete with the cache off: no room" in found(failed, scored(record, skipped=2))


def test_requested_log_probs():
    """Generated log-probs and the runner-up; prompt log-probs would keep the cached run from skipping anything."""
    (prompt,) = comparable([Prompt("a", RequestParams(return_log_probs=True, top_n_logprobs=5), "here")])
    assert not prompt.params.wants_prompt_log_probs
    assert prompt.params.top_n_logprobs == 5
    (prompt,) = comparable([Prompt("a", RequestParams(temperature=1.0, top_k=1, cache_salt="x"), "here")])
    assert (prompt.params.return_log_probs, prompt.params.top_n_logprobs, prompt.params.cache_salt) == (True, 2, "x")
    assert prompt.params.temperature == 0, "processed log-probs would have no runner-up"


def test_sampling_is_refused():
    prompts = [Prompt("a", RequestParams(), "line 1"), Prompt("b", RequestParams(temperature=0.5), "line 2")]
    with pytest.raises(
        ConfigError, match=r"^line 2: --prefix-cache-compare needs greedy requests, .* temperature 0\.5"
    ):
        comparable(prompts)


def printed(pairs, dtype: torch.dtype = FP32, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_comparison(pairs, problems(pairs, dtype), dtype, console)
    return console.file.getvalue()


def test_table(record):
    """The table shows the requests that differ."""
    text = printed(compare([scored(record)] * 2, [scored(record, skipped=2), scored(record, tokens=(7, 9), skipped=1)]))
    (row,) = [line for line in text.splitlines() if "│" in line]
    assert "differ from the 2. on" in row
    assert "1 request left out; the first differing requests are shown" in text
    assert "1 of 2 requests have different tokens" in text
    assert "the cache changes nothing" not in text


def test_many_requests_are_not_all_shown(record):
    pairs = compare([scored(record, request_id=i) for i in range(200)], [scored(record, skipped=2)] * 200)
    text = printed(pairs, width=80)
    assert len([line for line in text.splitlines() if "│" in line]) == 10
    assert "190 requests left out; the first and last are shown" in text
    assert all(len(line) <= 80 for line in text.splitlines()[:14])


def test_verdict_names_the_compared_values_and_the_limit(record):
    """The verdict in 16 bits allows differences and names two limits for them."""
    pairs = compare([scored(record)], [scored(record, log_probs=(-0.5076, -1.001), skipped=2)])
    text = printed(pairs, BF16)
    assert "1 request compared, off and on: 2 tokens equal" in text
    assert "log-probs in bfloat16: 95th percentile of the differences 7.6e-03, limit 0.049 (ln 1.05);" in text
    assert "the largest difference is 7.6e-03, limit 0.182 (ln 1.2)" in text
    assert text.splitlines()[-1] == "the cache changes nothing else"
    text = printed(compare([scored(record)], [scored(record, log_probs=(-0.5, -1.0004), skipped=2)]))
    assert "log-probs in float32: the largest difference is 4.0e-04, limit 0.001" in text


def test_a_tie_is_told(record):
    pairs = compare([scored(record, runner_up=0.9e-4)], [scored(record, tokens=(9, 3), skipped=2)])
    text = printed(pairs)
    assert "equal up to a tie, 0 of them" in text
    assert "0 tokens equal; 1 request diverged at a tie of two tokens" in text
