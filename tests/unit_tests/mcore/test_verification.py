"""Speculation changes no token, logit, state, block or snapshot: engines with drafts beside one without."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.linear.few_rows import rows_are_independent
from megatron_ext.speculation.ngram import NgramDrafter
from tests.on_request import long_except
from tests.unit_tests.support.drafters import (
    ANSWERS,
    Knowing,
    Pair,
    assert_same,
    assert_same_cache,
    caching,
)
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.models import CONFIGS, build_slow_decay

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


def bits_of(driver: Driver) -> dict[tuple[int, int], Tensor]:
    """Return the logits of the last step that computed each position, by request and position."""
    return {
        (request_id, position): logits[-1]
        for request_id, seen in driver.seen.items()
        for position, logits in seen.logits.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("kind", long_except(["hybrid", "attention_only"], [*KINDS, "experts"]))
@pytest.mark.skipif(not cpp.can_be_built(), reason="no C++ compiler")
def test_no_bit_changes_in_16_bits(kind, dtype):
    """SP-1: logits of rows that verify drafts are those of decode steps to the bit; some sums have 8,192 products."""
    config = dataclasses.replace(
        CONFIGS[kind], ffn_hidden_size=8192, moe_ffn_hidden_size=8192 if kind == "experts" else None
    )
    model = build_slow_decay(config).to(dtype)
    if not rows_are_independent(next(model.parameters())):
        pytest.skip("not measured on this CPU")
    pair = Pair(lambda **options: Driver(model, config, dtype=dtype, **options), cache=caching("kernel"))
    drafter = Knowing(ANSWERS["right_for_a_while"])
    chat(pair.plain)
    drafter.truth = pair.truth()
    driver = pair.speculating(drafter, 4)
    chat(driver)
    assert driver.engine.controller.draft_exactness() == "verified to the bits of single tokens"
    found, expected = bits_of(driver), bits_of(pair.plain)
    assert driver.scheduler.counters.accepted > 10
    assert expected.keys() <= found.keys()
    assert [place for place, logits in expected.items() if not torch.equal(logits, found[place])] == []


@pytest.mark.parametrize(
    "settings", [{}, {"ssm_states_dtype": "bf16", "dtype": torch.bfloat16}], ids=["fp32", "states"]
)
def test_rounding_of_drafts_is_said_at_the_start(settings):
    """SP-3: in fp32 libraries add up one row in another order than several; states of 16 bits are rounded by step."""
    model = build_slow_decay(CONFIGS["hybrid"]).to(settings.get("dtype", torch.float32))
    drafting = Driver(model, CONFIGS["hybrid"], speculative_tokens=2, drafter=Knowing(ANSWERS["right"]), **settings)
    assert drafting.engine.controller.draft_exactness().startswith("verified within rounding")
    engine = Driver(model, CONFIGS["hybrid"], **settings).engine
    assert engine.controller.draft_exactness() == ""


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
