"""Engines whose own layer of multi-token prediction drafts: nothing changes, and its logits are those of whole texts.

Verification hides wrong drafts, so tokens alone cannot show that a layer reads the right hidden states and keys.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from megatron_ext.mcore import hidden_states
from megatron_ext.mcore.hidden_states import HiddenStates
from megatron_ext.speculation.drafter import DraftRequest
from tests.on_request import long_except
from tests.unit_tests.mcore.test_verification import chat
from tests.unit_tests.support.drafters import assert_same, assert_same_cache, caching
from tests.unit_tests.support.driver import Driver, assert_logits_close, make_prompt
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.multi_token import LAYERS, MODES, Watched, predicting, worst_difference


@cache
def plain(kind: str, mode: str | None) -> Driver:
    driver = Driver(predicting(kind), CONFIGS[kind], cache=caching(mode))
    chat(driver)
    return driver


def cases() -> list:
    """Every kind, mode and number of drafts; some are quick, each number with a mode is long."""
    found = []
    for (i, kind), count, (j, mode) in itertools.product(enumerate(LAYERS), range(1, 5), enumerate(MODES)):
        is_quick = count == 1 + i % 4 and j == i % 3
        is_first = is_quick and kind in {"hybrid", "attention_only"}
        marks = () if is_first else (pytest.mark.long if is_quick or (i + count + j) % 3 == 0 else pytest.mark.soak,)
        found.append(pytest.param(kind, count, mode, id=f"{kind}-{count}-{mode}", marks=marks))
    return found


@pytest.mark.parametrize(("kind", "count", "mode"), cases())
def test_nothing_changes(kind, count, mode):
    """SP-10: tokens, logits, states, blocks, snapshots and counts are those without drafts."""
    driver = Watched(kind, count, mode)
    chat(driver)
    assert_same(driver, plain(kind, mode))
    if mode is not None:
        assert_same_cache(driver, plain(kind, mode))
    drafted, accepted = driver.scheduler.counters.drafted, driver.scheduler.counters.accepted
    assert 0 < accepted <= drafted
    assert len(driver.steps) == len(plain(kind, mode).steps) - accepted
    driver.drafter.check()


def parted(driver: Watched) -> dict[int, list[int]]:
    """Two prompts that part right after a block, and a turn after the second; whole texts by request."""
    block = driver.context.block_size_tokens
    common = make_prompt(2 * block, seed=4)
    for name, prompt in enumerate(([*common, 5, 9, 11], [*common, 6, 2])):
        driver.add(name, prompt, num_tokens_to_generate=12, skip_prompt_log_probs=True)
        driver.run()
    second = driver.records[1]
    driver.add(
        2, [*second.prompt_tokens, *second.generated_tokens, 7], num_tokens_to_generate=12, skip_prompt_log_probs=True
    )
    records = driver.run()
    return {name: [*one.prompt_tokens, *one.generated_tokens] for name, one in records.items()}


def worst(driver: Watched) -> float:
    """Largest difference of a draft's logits."""
    texts = parted(driver)
    assert driver.records[1].skipped_prefill_token_count == 2 * driver.context.block_size_tokens
    return worst_difference(driver, texts)


@pytest.mark.parametrize("kind", long_except(["hybrid", "attention_only"], LAYERS))
def test_logits_of_drafts(kind):
    """SP-10: of texts that share their blocks, from the first computed token on; across rejections."""
    driver = Watched(kind, 3, "kernel")
    assert worst(driver) < 1e-4
    assert {draft[3] for draft in driver.drafts} == {0, 1, 2}
    firsts = {name: first for name, _, _, _, first, _ in driver.drafts}
    assert firsts[0] == 1
    assert firsts[1] == 2 * driver.context.block_size_tokens + 1


def test_a_wrong_hidden_state_is_seen(monkeypatch):
    """The negative control: the state after the token itself instead of the one before it."""
    read = HiddenStates.read

    def later(self, wanted):
        return read(self, [(name, range(one.start + 1, one.stop + 1)) for name, one in wanted])

    monkeypatch.setattr(HiddenStates, "read", later)
    driver = Watched("attention_only", 2, "kernel")
    assert not worst(driver) < 1e-4


def test_more_tokens_than_are_kept(monkeypatch):
    """SP-10: the layer's text begins with the last tokens of the prompt whose hidden states are kept."""
    monkeypatch.setattr(hidden_states, "KEPT_TOKENS", 8)
    driver = Watched("hybrid", 2, "kernel")
    assert worst(driver) < 1e-4
    firsts = {name: first for name, _, _, _, first, _ in driver.drafts}
    assert firsts[0] == 2 * driver.context.block_size_tokens + 3 - 8 + 1


def test_a_proposal_again():
    """SP-10: a request that made no step since then has the same drafts; the layer goes on from what it has read."""
    driver = Watched("hybrid", 3, None)
    driver.add(0, make_prompt(21), num_tokens_to_generate=8)
    for _ in range(3):
        driver.step()
    ask = DraftRequest(0, next(iter(driver.scheduler.queues.running)).tokens, 3)
    drafts = driver.drafter.propose([ask])
    assert len(drafts[0]) == 3
    before = len(driver.drafts)
    assert driver.drafter.propose([ask]) == drafts
    again = driver.drafts[before:]
    for one, other in zip(driver.drafts[before - len(again) : before], again, strict=True):
        assert_logits_close(one[-1], other[-1])
    driver.run()


def test_a_request_that_lives_through_a_suspend_is_drafted_for_as_before():
    """SP-10: outputs of the layer from before the suspend are no part of its next drafts."""
    driver = Watched("attention_only", 2, None)
    driver.add(0, make_prompt(21), num_tokens_to_generate=12)
    driver.step()
    driver.step()
    driver.engine.suspend()
    driver.engine.resume()
    driver.run()
    assert driver.scheduler.counters.drafted > 4
    assert worst_difference(driver) < 1e-4
