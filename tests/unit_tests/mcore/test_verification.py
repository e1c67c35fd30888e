"""Speculation changes no token, logit, state, block or snapshot: engines with drafts beside one without."""

from __future__ import annotations

import itertools

import pytest

from tests.priority import TestPriority
from tests.unit_tests.support.drafters import (
    ANSWERS,
    Knowing,
    Pair,
    assert_same,
    assert_same_cache,
    caching,
)
from tests.unit_tests.support.driver import Driver, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

KINDS = ["hybrid", "gated_delta_net", "mamba1", "short_conv", "attention_only"]
MODES = ["kernel", "align"]  # in turns; and with the cache off each time
SAMPLED = {"temperature": 1.0, "top_k": 20, "seed": 3}


def chat(driver: Driver) -> None:
    """A prompt and two turns, one after the other; greedy and sampled. The first answer ends at the end of a block."""
    driver.add(0, make_prompt(21), num_tokens_to_generate=27, skip_prompt_log_probs=True)
    records = driver.run()
    turn = [*records[0].prompt_tokens, *records[0].generated_tokens, *make_prompt(5, 1)]
    driver.add(1, turn, num_tokens_to_generate=20, skip_prompt_log_probs=True, top_n_logprobs=3, **SAMPLED)
    records = driver.run()
    driver.add(2, [*records[1].prompt_tokens, *records[1].generated_tokens][:80], num_tokens_to_generate=18)
    driver.run()


@pytest.fixture(scope="module")
def pairs(get_driver):
    """A plain engine after `chat`, of each kind and mode; built when asked for."""
    found = {}

    def of(kind: str, mode: str | None) -> Pair:
        if (kind, mode) not in found:
            pair = found[kind, mode] = Pair(lambda **kw: get_driver(kind, **kw), cache=caching(mode))
            chat(pair.plain)
        return found[kind, mode]

    return of


CASES = [
    pytest.param(kind, count, name, mode, id=f"{kind}-{count}-{name}-{mode}")
    for (i, kind), (j, count), (k, name) in itertools.product(
        enumerate(KINDS), enumerate((1, 3, 7)), enumerate(ANSWERS)
    )
    for mode in [MODES[(i + j + k) % 2], None]
]


@pytest.mark.parametrize(("kind", "count", "name", "mode"), CASES)
def test_nothing_changes(pairs, kind, count, name, mode):
    """SP-2, SP-3, SP-4, EX-12, LA-6: logits, states, blocks, snapshots and counts, for any drafts."""
    pair, drafter = pairs(kind, mode), Knowing(ANSWERS[name])
    drafter.truth = pair.truth()
    driver = pair.speculating(drafter, count)
    chat(driver)
    assert_same(driver, pair.plain)
    if mode is not None:
        assert_same_cache(driver, pair.plain)
    steps = len(driver.steps), len(pair.plain.steps)
    drafted, accepted = driver.scheduler.counters.drafted, driver.scheduler.counters.accepted
    assert (drafted, accepted) == tuple(sum(one[i] for one in drafter.told) for i in (1, 2))
    assert steps[0] == steps[1] - accepted
    assert drafter.forgotten == [0, 1, 2]
    if name == "right":
        assert accepted == drafted > (15, 30, 38)[(1, 3, 7).index(count)]
    elif name == "wrong":
        assert accepted == 0 < drafted
