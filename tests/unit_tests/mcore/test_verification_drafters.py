"""Speculation changes no output with any drafter: prompt lookup, and a model, for each kind of layer."""

from __future__ import annotations

import itertools

import pytest

from megatron_ext.speculation.ngram import NgramDrafter
from tests.priority import TestPriority
from tests.unit_tests.support.draft_models import make_draft_model
from tests.unit_tests.support.drafters import Pair, assert_same, assert_same_cache, caching
from tests.unit_tests.support.driver import Driver, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

KINDS = ["hybrid", "gated_delta_net", "mamba1", "short_conv", "attention_only"]
MODES = ["kernel", "align"]  # in turns; and with the cache off each time
SAMPLED = {"temperature": 1.0, "top_k": 20, "seed": 3}
CASES = [
    pytest.param(kind, count, who, mode, id=f"{kind}-{count}-{who}-{mode}")
    for (i, kind), (j, count), who in itertools.product(enumerate(KINDS), enumerate((1, 3, 7)), ("ngram", "model"))
    for mode in [MODES[(i + j + (who == "model")) % 2], None]
]


def talk(driver: Driver) -> None:
    """Prompts that repeat themselves and a next turn, one after the other; greedy and sampled."""
    driver.add(
        0, [*make_prompt(9), *make_prompt(9), *make_prompt(5)], num_tokens_to_generate=24, skip_prompt_log_probs=True
    )
    driver.run()
    driver.add(1, make_prompt(13, 2) * 3, num_tokens_to_generate=20, skip_prompt_log_probs=True, **SAMPLED)
    records = driver.run()
    driver.add(
        2,
        [*records[0].prompt_tokens, *records[0].generated_tokens],
        num_tokens_to_generate=20,
        skip_prompt_log_probs=True,
    )
    driver.run()


@pytest.fixture(scope="module")
def pairs(get_driver):
    """A plain engine after `talk`, of each kind and mode; built when asked for."""
    found = {}

    def of(kind: str, mode: str | None) -> Pair:
        if (kind, mode) not in found:
            found[kind, mode] = Pair(lambda **kw: get_driver(kind, **kw), cache=caching(mode))
            talk(found[kind, mode].plain)
        return found[kind, mode]

    return of


@pytest.mark.parametrize(("kind", "count", "who", "mode"), CASES)
def test_nothing_changes(pairs, get_oracle, kind, count, who, mode):
    """SP-1, SP-2, SP-3, SP-4: a draft model of the same weights is mostly right, n-grams now and then."""
    pair = pairs(kind, mode)
    drafter = NgramDrafter(longest=3, shortest=1) if who == "ngram" else make_draft_model(get_oracle, kind)
    driver = pair.speculating(drafter, count)
    talk(driver)
    assert_same(driver, pair.plain)
    if mode is not None:
        assert_same_cache(driver, pair.plain)
    counters = driver.scheduler.counters
    assert counters.drafted > (10 if who == "model" else 0)
    assert counters.accepted <= counters.drafted
    if who == "model":
        assert counters.accepted > 0
    assert len(driver.steps) <= len(pair.plain.steps)
