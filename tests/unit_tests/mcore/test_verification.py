"""Speculation changes no token, logit, state, block or snapshot: engines with drafts beside one without."""

from __future__ import annotations

import itertools

import pytest

from megatron_ext.speculation.ngram import NgramDrafter
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
COUNTS = [1, 3, 7]
DRAFTERS = [*ANSWERS, "ngram"]
MODES = ["kernel", "align", None]
SAMPLED = {"temperature": 1.0, "top_k": 20, "seed": 3}


def chat(driver: Driver) -> None:
    """A prompt and two turns, one after the other; greedy and sampled. The first output ends at the end of a block."""
    driver.add(0, make_prompt(21), num_tokens_to_generate=11, skip_prompt_log_probs=True)
    records = driver.run()
    turn = [*records[0].prompt_tokens, *records[0].generated_tokens, *make_prompt(5, 1) * 3]  # for n-grams
    driver.add(1, turn, num_tokens_to_generate=12, skip_prompt_log_probs=True, top_n_logprobs=3, **SAMPLED)
    records = driver.run()
    driver.add(2, [*records[1].prompt_tokens, *records[1].generated_tokens][:54], num_tokens_to_generate=12)
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


def cases() -> list:
    """Every kind, drafter and number of drafts, with modes in turns; some are quick, a third is long."""
    found = []
    numbered = itertools.product(enumerate(KINDS), enumerate(COUNTS), enumerate(DRAFTERS))
    for (i, kind), (j, count), (k, name) in numbered:
        mode = MODES[(i + j + k) % len(MODES)]
        is_quick = j == (i + k) % len(COUNTS) and (kind == "hybrid" or name == "right_for_a_while")
        is_first = is_quick and kind in {"hybrid", "attention_only"}
        marks = () if is_first else (pytest.mark.long if is_quick or j % 3 == k % 3 else pytest.mark.soak,)
        found.append(pytest.param(kind, count, name, mode, id=f"{kind}-{count}-{name}-{mode}", marks=marks))
    return found


@pytest.mark.parametrize(("kind", "count", "name", "mode"), cases())
def test_nothing_changes(pairs, kind, count, name, mode):
    """SP-1 to SP-4, EX-12, LA-6: logits, states, blocks, snapshots and counts, for any drafts and every drafter."""
    pair = pairs(kind, mode)
    if name in ANSWERS:
        drafter = Knowing(ANSWERS[name])
        drafter.truth = pair.truth()
    else:
        drafter = NgramDrafter(longest=3, shortest=1)
    driver = pair.speculating(drafter, count)
    chat(driver)
    assert_same(driver, pair.plain)
    if mode is not None:
        assert_same_cache(driver, pair.plain)
    drafted, accepted = driver.scheduler.counters.drafted, driver.scheduler.counters.accepted
    assert len(driver.steps) == len(pair.plain.steps) - accepted
    if name in ANSWERS:
        assert (drafted, accepted) == tuple(sum(one[i] for one in drafter.told) for i in (1, 2))
        assert drafter.forgotten == [0, 1, 2]
    if name == "right":
        assert accepted == drafted > (11, 20, 23)[COUNTS.index(count)]
    elif name == "wrong":
        assert accepted == 0 < drafted
    elif name == "ngram":
        assert drafted > 0
