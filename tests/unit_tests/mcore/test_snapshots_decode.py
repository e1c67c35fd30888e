"""EX-1: states are kept when decode crosses a block boundary, so that the next turn resumes in its own answer."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import Status
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import assert_snapshots_equal_oracle, build_driver


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


def known(driver, request_id: int) -> list[int]:
    """All tokens of an ended request."""
    record = driver.records[request_id]
    return [*record.prompt_tokens, *record.generated_tokens]


@pytest.mark.parametrize("budget", [19, 400])
def test_the_next_turns_of_a_chat(get_oracle, oracle, budget):
    """FX-2: each turn computes its own tokens and the tail of the answer before it, not more."""
    driver = build_driver(get_oracle, max_tokens=budget)
    tokens, skipped = make_prompt(20), []
    for turn in range(3):
        skipped.append(driver.sight(turn, tokens, num_tokens_to_generate=20))
        tokens = [*known(driver, turn), *make_prompt(10, seed=turn)]
    assert skipped == [0, 32, 64]
    assert assert_snapshots_equal_oracle(driver, tokens, oracle)[-1] == 96
    for turn in range(3):
        assert_equals_oracle(driver, turn, oracle)


def test_the_boundary_of_a_turn_that_ends_on_it(get_oracle, oracle):
    """The last token was sampled, not computed: a block that it would fill is not complete."""
    driver = build_driver(get_oracle)
    for request_id, length in enumerate((24, 25)):
        driver.sight(request_id, make_prompt(20, seed=request_id), num_tokens_to_generate=length - 20 + 8)
        tokens = known(driver, request_id)
        assert len(tokens) == length + 8
        assert assert_snapshots_equal_oracle(driver, tokens, oracle) == ([16] if length == 24 else [16, 32])
        assert driver.sight(10 + request_id, [*tokens, 5]) == (16 if length == 24 else 32)
        assert_equals_oracle(driver, 10 + request_id, oracle)


def test_only_the_last_one_is_kept(get_oracle, oracle):
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


class TestNeverAtTheCostOfPrefill:
    """Snapshots of decode are optional: they take free slots, and each other's."""

    def test_there_is_none_free(self, get_oracle, oracle):
        driver = build_driver(get_oracle, slots=1)
        driver.sight(0, make_prompt(20), num_tokens_to_generate=30)
        assert driver.snapshots_of(known(driver, 0)) == [16]
        assert (driver.states.skipped, driver.states.evicted) == (2, 0)
        assert driver.sight(1, known(driver, 0)) == 16
        assert_equals_oracle(driver, 1, oracle)

    def test_each_others(self, get_oracle, oracle):
        """The only slot belongs to another answer and was not used since."""
        driver = build_driver(get_oracle, slots=1)
        for request_id in range(2):
            driver.sight(request_id, make_prompt(10, seed=request_id), num_tokens_to_generate=10)
        assert [driver.snapshots_of(known(driver, i)) for i in range(2)] == [[], [16]]
        assert driver.sight(2, [*known(driver, 1), 5]) == 16
        driver.sight(3, make_prompt(10, seed=3), num_tokens_to_generate=10)  # now it is not optional any more
        assert driver.snapshots_of(known(driver, 1)) == [16]
        for request_id in range(4):
            assert_equals_oracle(driver, request_id, oracle)

    @pytest.mark.parametrize("slots", [1, 2])
    def test_a_prefill_in_the_same_step_has_the_free_slot(self, get_oracle, oracle, slots):
        """A decode and a prefill want a slot in one step, and one is free."""
        driver = build_driver(get_oracle, slots=slots)
        if slots == 2:
            driver.sight(0, make_prompt(BLOCK + 1))
        driver.add(1, make_prompt(14), num_tokens_to_generate=8)
        driver.step()
        driver.step()
        driver.add(2, make_prompt(BLOCK + 1, seed=2))
        driver.step()
        assert driver.steps[-1] == ((1, 15, 16), (2, 0, 17))
        driver.run()
        assert driver.snapshots_of(known(driver, 1)) == []
        assert driver.snapshots_of(known(driver, 2)) == [16]
        assert driver.states.evicted == 0
        if slots == 2:
            assert driver.snapshots_of(known(driver, 0)) == [16]


def test_of_many_at_once(get_oracle, oracle):
    """Several cross a boundary in one step, among others that do not, and one that ends with it."""
    driver = build_driver(get_oracle)
    for request_id, length in enumerate((28, 27, 28, 12, 5)):
        count = 6 if request_id == 2 else 12
        driver.add(request_id, make_prompt(length), num_tokens_to_generate=count)
    driver.run()
    for request_id in range(5):
        tokens = known(driver, request_id)
        assert_snapshots_equal_oracle(driver, tokens, oracle)
        driver.add(10 + request_id, [*tokens, 5, 6])
    driver.run()
    assert driver.skipped(*range(10, 15)) == [32, 32, 32, 16, 16]
    for request_id in driver.records:
        assert_equals_oracle(driver, request_id, oracle)


def test_of_an_aborted_answer(get_oracle, oracle):
    """Snapshots of the aborted answer serve a request that continues the text."""
    driver = build_driver(get_oracle)
    driver.add(0, make_prompt(20), num_tokens_to_generate=60)
    request = driver.engine.get_request(0)
    while request.computed_end < 40:
        driver.step()
    driver.engine.abort_request(0)
    driver.run()
    assert driver.records[0].status is Status.ABORTED
    assert driver.sight(1, [*known(driver, 0), 5]) == 32
    assert_equals_oracle(driver, 1, oracle)
