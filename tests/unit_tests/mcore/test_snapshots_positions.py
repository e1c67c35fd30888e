"""HY-4: positions and contents of the snapshots that prefill leaves, wherever it is split."""

from __future__ import annotations

import pytest

from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import assert_snapshots_equal_oracle, build_driver

WRITES = 4  # of a token: K and V of two attention layers
SYSTEM = make_prompt(2 * BLOCK + 7)


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


# Budgets that cut a prompt a token before the boundary 48, at it and after it; and of a shorter one slices of
# 1, 2 and 3 tokens, which are less than the convolution window.
CUTS = [(48, budget, 1) for budget in (47, 16, 49)] + [(48, 47, 8)]
CUTS += [(16, 1, 1), (16, 3, 1), (16, 2, 8)]


@pytest.mark.parametrize(("boundary", "budget", "token_rounder"), CUTS)
def test_wherever_the_prompt_is_cut(get_oracle, oracle, boundary, budget, token_rounder):
    """FX-2, FX-4, HY-8, HY-9, HY-10: the last boundary's snapshot is taken in whichever chunk it lies in."""
    driver = build_driver(get_oracle, max_tokens=budget, max_requests=1, token_rounder=token_rounder)
    prompt = make_prompt(boundary + 5)
    driver.sight(0, prompt, num_tokens_to_generate=1)
    assert driver.seen[0].chunks[:2] == [(0, budget), (budget, min(2 * budget, boundary + 5))]
    assert assert_snapshots_equal_oracle(driver, prompt, oracle) == [boundary]
    assert driver.sight(1, prompt) == boundary
    assert driver.sight(2, [*prompt, *make_prompt(9, seed=1)]) == boundary
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("budget", [10, 17, 400])
def test_cuts_of_a_prompt_that_resumed(get_oracle, oracle, budget):
    """FX-2: chunks count from the resume point; a turn of several chunks leaves its snapshot in the last but one."""
    driver = build_driver(get_oracle, max_tokens=budget, max_requests=1)
    driver.sight(0, SYSTEM)
    turn = [*SYSTEM, *make_prompt(40, seed=1)]
    assert driver.sight(1, turn) == 32
    assert driver.seen[1].chunks[0] == (32, min(32 + budget, 79))
    assert driver.steps[2][0] != (1, 32, 79) or budget == 400
    assert assert_snapshots_equal_oracle(driver, turn, oracle) == [32, 64]
    assert driver.sight(2, turn) == 64
    for request_id in (1, 2):
        assert_equals_oracle(driver, request_id, oracle)


class TestAlignedEnds:
    """The end of a prompt that is a boundary has a snapshot too, for what continues it; the prompt cannot use it."""

    @pytest.mark.parametrize("budget", [31, 400])
    def test_both_are_taken(self, get_oracle, oracle, budget):
        driver = build_driver(get_oracle, max_tokens=budget, max_requests=1)
        prompt = make_prompt(3 * BLOCK)
        driver.sight(0, prompt)
        assert assert_snapshots_equal_oracle(driver, prompt, oracle) == [32, 48]
        assert driver.sight(1, prompt) == 32
        assert driver.sight(2, [*prompt, 5]) == 48
        assert driver.records[1].prefill_reasons == {"no_snapshot": 15, "last_token": 1}
        for request_id in (1, 2):
            assert_equals_oracle(driver, request_id, oracle)

    def test_of_one_block(self, get_oracle, oracle):
        """There is no boundary below its end but 0."""
        driver = build_driver(get_oracle)
        prompt = make_prompt(BLOCK)
        driver.sight(0, prompt)
        assert assert_snapshots_equal_oracle(driver, prompt, oracle) == [16]
        assert driver.sight(1, prompt) == 0
        assert driver.sight(2, [*prompt, 5]) == 16
        for request_id in (1, 2):
            assert_equals_oracle(driver, request_id, oracle)


class TestDivergence:
    """The third prompt that begins alike resumes where the first two part."""

    @pytest.mark.parametrize("budget", [19, 400])
    def test_the_third_sighting_hits(self, get_oracle, oracle, budget):
        driver = build_driver(get_oracle, max_tokens=budget)
        prompts = [[*SYSTEM, *make_prompt(30, seed=seed)] for seed in range(3)]
        assert [driver.sight(i, prompt) for i, prompt in enumerate(prompts)] == [0, 0, 32]
        assert [driver.records[i].matched_block_count for i in range(3)] == [0, 2, 2]
        for prompt in prompts[:2]:
            assert assert_snapshots_equal_oracle(driver, prompt, oracle) == [32, 64]
        assert driver.records[1].prefill_reasons == {"no_snapshot": 32, "not_cached": 32, "partial_block": 5}
        assert driver.writes.dropped == WRITES * 32
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, oracle)

    def test_within_a_prompt_that_resumed(self, get_oracle, oracle):
        """Matched beyond the resume point: what is shared is computed, not written, and gets its snapshot."""
        driver = build_driver(get_oracle)
        long = [*SYSTEM, *make_prompt(60, seed=1)]
        driver.sight(0, SYSTEM)
        driver.sight(1, long)
        other = [*long[:85], *make_prompt(20, seed=2)]
        dropped = driver.writes.dropped
        assert driver.sight(2, other) == 64  # SI-1: no states were requested there
        assert driver.records[2].matched_block_count == 5
        assert driver.writes.dropped - dropped == WRITES * (80 - 64)
        assert assert_snapshots_equal_oracle(driver, other, oracle) == [32, 64, 80, 96]
        assert driver.sight(3, [*long[:83], 5]) == 80
        for request_id in range(4):
            assert_equals_oracle(driver, request_id, oracle)

    def test_of_a_prefix_that_still_runs(self, get_oracle, oracle):
        """Shared by two that run at once; both owners' KV and states are their own."""
        driver = build_driver(get_oracle)
        driver.add(0, [*SYSTEM, *make_prompt(30, seed=0)], num_tokens_to_generate=20)
        driver.step()
        driver.step()
        driver.add(1, [*SYSTEM, *make_prompt(30, seed=1)], num_tokens_to_generate=20)
        driver.step()
        driver.add(2, [*SYSTEM, *make_prompt(30, seed=2)], num_tokens_to_generate=20)
        driver.run()
        assert driver.skipped(0, 1, 2) == [0, 0, 32]
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, oracle)


class TestWholePrefixAtOnce:
    """FX-3: the step's budget counts computed tokens only."""

    @pytest.mark.parametrize("chunked", [True, False])
    def test_a_warm_prompt_longer_than_a_step(self, get_oracle, oracle, chunked):
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

    def test_without_chunks_it_waits_for_a_step_with_room(self, get_oracle, oracle):
        """The prompt's 35 tokens do not fit beside 40 others; it skips as much in the next step."""
        driver = build_driver(get_oracle, max_tokens=60, max_requests=4, enable_chunked_prefill=False)
        prompt = make_prompt(20)
        driver.sight(0, prompt)
        driver.add(1, make_prompt(40, seed=1))
        driver.add(2, [*prompt, *make_prompt(31, seed=2)])
        driver.step()
        assert driver.steps[-1] == ((1, 0, 40),)
        driver.step()
        assert driver.steps[-1] == ((1, 40, 41), (2, 16, 51))
        driver.run()
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, oracle)


def test_requests_that_opt_out_leave_no_snapshots(get_oracle, oracle):
    """KV-9: opted out neither reads nor writes; section 9 A 10: no slot is spent on blocks without a block hash."""
    driver = build_driver(get_oracle, slots=1)
    prompt = make_prompt(40)
    assert driver.sight(0, prompt, enable_prefix_caching=False, num_tokens_to_generate=20) == 0
    assert (driver.states.taken, driver.states.skipped, driver.states.used_count) == (0, 0, 0)
    driver.sight(1, prompt)
    assert driver.snapshots_of(prompt) == [32]
    assert driver.sight(2, prompt, enable_prefix_caching=False) == 0
    assert driver.sight(3, prompt) == 32
    for request_id in range(4):
        assert_equals_oracle(driver, request_id, oracle)
