"""SE-2: log-probs are scored within a stated budget, and what finds no memory costs its own request only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_ext.runner import sampler
from megatron_ext.runner.sampler import rows_at_once, score_rows
from megatron_ext.scheduling.record import RequestRecord, Status
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.models import VOCABULARY, build_slow_decay

PROMPT = make_prompt(150)
CPU_ALLOCATOR = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.fixture
def driver() -> Driver:
    """Around a model of its own, whose output layer a test may watch."""
    return Driver(build_slow_decay(CONFIGS["hybrid"]), CONFIGS["hybrid"], max_tokens=100)


def watch_output_layer(driver: Driver, on_rows: Callable[[int], None]) -> None:
    layer = driver.engine.controller.inference_wrapped_model.model.output_layer
    layer.register_forward_pre_hook(lambda _, inputs: on_rows(inputs[0].shape[0]))


def at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(sampler, "SCORING_BYTES", rows * VOCABULARY * 12)
    assert rows_at_once(VOCABULARY) == rows


def scores(record: RequestRecord) -> torch.Tensor:
    return torch.tensor([*record.prompt_log_probs, *record.generated_log_probs])


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_logits_are_never_more_than_the_budget(driver, monkeypatch, rows):
    """SE-2: the budget holds in the forward and after it; log-probs and best tokens equal those of all rows at once."""
    driver.add(0, PROMPT, top_n_logprobs=3)
    whole = driver.run()[0]
    seen: list[int] = []
    watch_output_layer(driver, seen.append)
    at_once(monkeypatch, rows)
    driver.add(1, PROMPT, top_n_logprobs=3)
    pieces = driver.run()[1]
    assert max(seen) == rows
    assert sum(seen) == len(PROMPT) - 1 + 8
    torch.testing.assert_close(scores(pieces), scores(whole), atol=1e-5, rtol=1e-5)
    assert len(pieces.prompt_log_probs) == len(PROMPT) - 1
    for mine, other in zip(pieces.prompt_top_n_log_probs, whole.prompt_top_n_log_probs, strict=True):
        assert len(mine) == 3
        assert mine == pytest.approx(other, abs=1e-5)


def test_rows_that_ask_for_different_numbers(monkeypatch):
    """Each row by itself: pieces that cut between them change nothing, ties included."""
    logits = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(1))
    targets, top_n = torch.arange(9), [0, 5, 1, 0, 97, 200, 2, 3, 0]
    expected = logits.log_softmax(-1)
    for rows in (1, 4, 9, 100):
        at_once(monkeypatch, rows)
        found = score_rows(lambda part: logits[part], VOCABULARY, targets, top_n)
        for i, score in enumerate(found):
            assert score.log_prob == pytest.approx(expected[i, i].item(), abs=1e-6)
            best = expected[i].topk(min(top_n[i], VOCABULARY))
            assert list(score.top_n) == best.indices.tolist()
            assert list(score.top_n.values()) == pytest.approx(best.values.tolist(), abs=1e-6)
    assert score_rows(lambda part: logits[part], VOCABULARY, torch.arange(0), []) == ()


@pytest.mark.parametrize("error", [MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory"), CPU_ALLOCATOR])
def test_no_memory_for_a_prompt_ends_its_request(driver, get_oracle, monkeypatch, error):
    """SE-2: only the request itself ends; its memory is free at once."""
    at_once(monkeypatch, 10)

    def no_memory(rows: int) -> None:
        if rows == 10:  # only the long prompt has as many
            raise error

    watch_output_layer(driver, no_memory)
    driver.add(0, make_prompt(20), skip_prompt_log_probs=True)
    driver.add(1, PROMPT)
    driver.add(2, make_prompt(6))
    records = driver.run()
    assert records[1].status is Status.FAILED
    assert "no memory for its log-probs" in records[1].error
    assert str(error)[:30] in records[1].error
    assert records[1].is_fault
    for request_id in (0, 2):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
    assert "ERROR_TRANSIENT" not in [*driver.events(0), *driver.events(2)]


def test_no_memory_for_sampled_tokens_ends_those_that_find_none_alone(driver, get_oracle, monkeypatch):
    """SE-2: memory lacks for the whole batch, then only for one row; rows without log-probs are not affected."""
    requests = {}

    def starved(logits_of, vocabulary, targets, top_n):
        if len(targets) > 1 or max(top_n) == 4:
            raise MemoryError("no more")
        return score_rows(logits_of, vocabulary, targets, top_n)

    for name, best in enumerate((0, 4, 2)):
        requests[name] = driver.add(name, make_prompt(20 + name), top_n_logprobs=best, skip_prompt_log_probs=True)
    driver.add(3, make_prompt(9), return_log_probs=False)
    driver.step()
    monkeypatch.setattr("megatron_ext.runner.step_output.score_rows", starved)
    records = driver.run()
    assert records[1].status is Status.FAILED
    for request_id in (0, 2, 3):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


def test_equal_log_probs_are_listed_by_their_ids() -> None:
    """SE-2: which tokens a row lists depends on no other row: not on how many of the best that one lists."""
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(3)).round()  # ties
    targets = torch.zeros(40, dtype=torch.int64)
    few = score_rows(lambda rows: logits[rows], VOCABULARY, targets, [3] * 40)
    many = score_rows(lambda rows: logits[rows], VOCABULARY, targets, [3] * 39 + [100])
    assert few[:39] == many[:39]
    for row, score in zip(logits, few, strict=True):
        assert list(score.top_n) == row.argsort(stable=True, descending=True)[:3].tolist()
