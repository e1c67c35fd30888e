"""HY-4, EX-1: positions and contents of the snapshots that prefill and decode leave, wherever a prompt is split."""

from __future__ import annotations

import pytest

from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import assert_snapshots_equal_oracle, build_driver

SYSTEM = make_prompt(2 * BLOCK + 7)
LONG, LONG_SYSTEM = [*SYSTEM, *make_prompt(60, seed=1)], make_prompt(9 * BLOCK + 7)


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


def twice_and_longer(length: int) -> list[list[int]]:
    """A prompt, the same again, and one that continues it."""
    prompt = make_prompt(length)
    return [prompt, prompt, [*prompt, *make_prompt(9, seed=1)]]


def parting(beginning: list[int], *lengths: int) -> list[list[int]]:
    """Prompts that begin alike and end otherwise."""
    return [[*beginning, *make_prompt(length, seed=seed)] for seed, length in enumerate(lengths)]


# Prompts served one after the other, the tokens that each skips, and where snapshots are at the end, by prompt.
CUT = twice_and_longer(3 * BLOCK + 5), [0, 48, 48], {0: [48]}
SHORT = twice_and_longer(BLOCK + 5), [0, 16, 16], {0: [16]}
ALIGNED = twice_and_longer(3 * BLOCK), [0, 32, 48], {0: [32, 48]}
TURN = [SYSTEM, *[[*SYSTEM, *make_prompt(40, seed=1)]] * 2], [0, 32, 64], {1: [32, 64]}
THIRD = parting(SYSTEM, 30, 30, 30), [0, 0, 32], {0: [32, 64], 1: [32, 64]}
# SI-1: the third resumes where no states were requested.
WITHIN = [SYSTEM, LONG, [*LONG[:85], *make_prompt(20, seed=2)], [*LONG[:83], 5]], [0, 32, 64, 80], {2: [32, 64, 80, 96]}
SECOND = parting(LONG_SYSTEM, 40, 41, 42), [0, 8 * BLOCK, 9 * BLOCK], {}


@pytest.mark.parametrize(
    ("series", "budget"),
    [
        *((CUT, budget) for budget in (47, 16, 49)),  # around its boundary
        *((SHORT, budget) for budget in (1, 3, 2)),  # shorter than the convolution
        *((TURN, budget) for budget in (10, 17, 400)),
        *((ALIGNED, budget) for budget in (31, 400)),
        *((THIRD, budget) for budget in (19, 400)),
        (WITHIN, 400),
        *((SECOND, budget) for budget in (400, 64, 37)),
    ],
)
def test_wherever_prompts_are_cut(get_oracle, oracle, series, budget):
    """FX-2, FX-4, HY-8, HY-9: states by a token-by-token recurrence, logits by a plain recompute."""
    prompts, skipped, left = series
    driver = build_driver(get_oracle, max_tokens=budget, max_requests=1)
    assert [driver.sight(i, prompt) for i, prompt in enumerate(prompts)] == skipped
    for request_id, prompt in enumerate(prompts):
        found = assert_snapshots_equal_oracle(driver, prompt, oracle)
        assert found == left.get(request_id, found)
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_warm_prompt_longer_than_a_step(get_oracle, oracle, chunked):
    """FX-3: the step's budget counts computed tokens only."""
    driver = build_driver(get_oracle, max_tokens=60, max_requests=4, enable_chunked_prefill=chunked)
    prompt = make_prompt(50)
    driver.sight(0, prompt, num_tokens_to_generate=40 if chunked else 5)
    turn = [*prompt, *driver.records[0].generated_tokens, *make_prompt(5, seed=1)]
    driver.add(1, turn)
    driver.add(2, make_prompt(40, seed=3))
    driver.step()
    start = 80 if chunked else 48
    assert driver.steps[-1] == ((1, start, len(turn)), (2, 0, 40))
    driver.run()
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


def known(driver: Driver, request_id: int) -> list[int]:
    """All tokens of an ended request."""
    record = driver.records[request_id]
    return [*record.prompt_tokens, *record.generated_tokens]


@pytest.mark.parametrize("budget", [19, 400])
def test_the_next_turns_of_a_chat(get_oracle, oracle, budget):
    """EX-1, FX-2: each turn computes its own tokens and the tail of the answer before it, not more."""
    driver = build_driver(get_oracle, max_tokens=budget)
    tokens, skipped = make_prompt(20), []
    for turn in range(3):
        skipped.append(driver.sight(turn, tokens, num_tokens_to_generate=20))
        tokens = [*known(driver, turn), *make_prompt(10, seed=turn)]
    assert skipped == [0, 32, 64]
    assert assert_snapshots_equal_oracle(driver, tokens, oracle)[-1] == 96
    for turn in range(3):
        assert_equals_oracle(driver, turn, oracle)


def test_only_the_last_one_of_a_decode_is_kept(get_oracle, oracle):
    """A new snapshot replaces the unused one before it, but not one of prefill and not one that was used."""
    driver = build_driver(get_oracle)
    driver.add(0, make_prompt(20), num_tokens_to_generate=60)
    request = driver.engine.get_request(0)
    kept = []
    while not request.is_ended:
        driver.step()
        if request.computed_end % BLOCK == 0 and not request.is_ended:
            kept.append(assert_snapshots_equal_oracle(driver, request.tokens, oracle))
            if request.computed_end == 48:
                driver.add(1, request.tokens[:49])
    driver.run()
    assert kept == [[16, 32], [16, 48], [16, 48, 64]]
    assert (driver.states.replaced, driver.states.evicted) == (1, 0), "slots are plenty: none was wanted for"
    assert driver.skipped(1) == [48]
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, oracle)


def test_a_checkpoint(get_oracle, oracle):
    """SI-1: a declared position has its snapshot when the prompt is computed."""
    driver = build_driver(get_oracle)
    first, second = parting(LONG_SYSTEM, 40, 41)
    driver.sight(0, first, cache_checkpoint=(len(LONG_SYSTEM),))
    assert driver.sight(1, second) == 9 * BLOCK
    for request_id in range(2):
        assert_equals_oracle(driver, request_id, oracle)
