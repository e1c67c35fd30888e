"""Every comparison can fail: an engine whose pools are corrupted between two steps must not equal the oracle.

Each control runs twice. As it is, everything is equal; with the corruption, the comparison of logits raises. Where the
corruption is one of states, the comparison of states alone raises too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.priority import TestPriority
from tests.unit_tests.support.driver import (
    Driver,
    assert_equals_oracle,
    assert_states_equal_oracle,
    make_prompt,
)

pytestmark = pytest.mark.priority(TestPriority.HIGH)

VICTIM, OTHER = 0, 1
PROMPT_LENGTH = 129


def run(driver: Driver, corrupt: Callable[[Driver], None] = lambda driver: None, *, after_tokens: int = 132) -> Driver:
    """Two requests; `corrupt` is called once, when so many tokens of the victim have been computed."""
    driver.add(VICTIM, make_prompt(PROMPT_LENGTH))
    driver.add(OTHER, make_prompt(64))
    victim = driver.engine.get_request(VICTIM)
    while victim.computed_end < after_tokens:
        driver.step()
    corrupt(driver)
    driver.run()
    return driver


def slot(driver: Driver, request_id: int = VICTIM) -> int:
    return driver.engine.get_request(request_id).sequence.running_slot


LAYERS = [
    pytest.param(slice(0, 2), id="all_layers"),
    pytest.param(slice(0, 1), id="first_layer"),
    pytest.param(slice(1, 2), id="second_layer"),
]
# In the middle of decoding, and between two chunks of a prefill (chunks of 40 tokens).
MOMENTS = [pytest.param(132, id="decode"), pytest.param(80, id="prefill")]


@pytest.fixture
def hybrid(get_driver) -> Driver:
    return get_driver("hybrid", max_tokens=40)


def assert_is_seen(driver: Driver, oracle: object, *, in_states: bool) -> None:
    """The comparison of everything fails; of states alone, if the corruption shows there."""
    with pytest.raises(AssertionError):
        assert_equals_oracle(driver, VICTIM, oracle)
    if in_states:
        with pytest.raises(AssertionError, match="states of request"):
            assert_states_equal_oracle(driver, VICTIM, oracle)


def assert_logits_differ(driver: Driver, oracle: object) -> None:
    """The last logits are far from the oracle's for the tokens that the request did get: not only states see it."""
    record = driver.records[VICTIM]
    tokens = [*record.prompt_tokens, *record.generated_tokens]
    last = len(tokens) - 1
    difference = (driver.seen[VICTIM].logits[last][-1] - oracle.logits(tokens[:last])[-1]).abs().max()
    assert difference > 1e-3, difference


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_without_corruption_all_is_equal(get_driver, get_oracle, kind):
    driver = run(get_driver(kind, max_tokens=40))
    assert_equals_oracle(driver, VICTIM, get_oracle(kind))
    assert_equals_oracle(driver, OTHER, get_oracle(kind))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("which", ["ssm", "conv"])
def test_a_zeroed_state_is_seen(hybrid, get_oracle, which, layer, moment):
    def zero(driver: Driver) -> None:
        getattr(driver.context.live_states, which)[layer, slot(driver)] = 0.0

    run(hybrid, zero, after_tokens=moment)
    assert_is_seen(hybrid, get_oracle("hybrid"), in_states=True)
    if which == "ssm" or moment > PROMPT_LENGTH:
        assert_logits_differ(hybrid, get_oracle("hybrid"))
    assert_equals_oracle(hybrid, OTHER, get_oracle("hybrid"))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("which", ["ssm", "conv"])
def test_two_swapped_rows_are_seen(hybrid, get_oracle, which, layer):
    def swap(driver: Driver) -> None:
        states = getattr(driver.context.live_states, which)[layer]
        slots = [slot(driver, VICTIM), slot(driver, OTHER)]
        states[:, slots] = states[:, slots[::-1]].clone()

    run(hybrid, swap, after_tokens=130)
    assert_is_seen(hybrid, get_oracle("hybrid"), in_states=True)
    assert_logits_differ(hybrid, get_oracle("hybrid"))
    with pytest.raises(AssertionError):
        assert_equals_oracle(hybrid, OTHER, get_oracle("hybrid"))


@pytest.mark.parametrize("which", ["ssm", "conv"])
def test_a_state_from_one_token_earlier_is_seen(hybrid, get_oracle, which):
    def shift(driver: Driver) -> None:
        states = getattr(driver.context.live_states, which)[:, slot(driver)]
        before = states.clone()
        driver.step()
        states.copy_(before)

    run(hybrid, shift)
    assert_is_seen(hybrid, get_oracle("hybrid"), in_states=True)
    assert_logits_differ(hybrid, get_oracle("hybrid"))


def test_an_ignored_initial_state_is_seen(hybrid, get_oracle):
    """Continuation chunks that start from zero, as if they were the beginning."""
    stage = hybrid.context.stage

    def stage_without_states(chunks: object) -> None:
        stage(chunks)
        step = hybrid.context.step
        slots = step.recurrent.prefill_slots
        if slots is None:
            return
        forgotten = dataclasses.replace(slots, has_initial_state=torch.zeros_like(slots.has_initial_state))
        recurrent = dataclasses.replace(step.recurrent, prefill_slots=forgotten)
        hybrid.context.step = dataclasses.replace(step, recurrent=recurrent)

    hybrid.context.stage = stage_without_states
    run(hybrid)
    assert len(hybrid.seen[VICTIM].chunks) > 8  # it was cut, and decoded
    assert_is_seen(hybrid, get_oracle("hybrid"), in_states=True)
    assert_logits_differ(hybrid, get_oracle("hybrid"))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_a_zeroed_block_is_seen(get_driver, get_oracle, kind, moment):
    def zero(driver: Driver) -> None:
        driver.context.memory_buffer[:, :, driver.engine.get_request(VICTIM).block_table[2]] = 0.0

    driver = run(get_driver(kind, max_tokens=40), zero, after_tokens=moment)
    assert_is_seen(driver, get_oracle(kind), in_states=False)
    assert_logits_differ(driver, get_oracle(kind))
    assert_equals_oracle(driver, OTHER, get_oracle(kind))


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_two_swapped_blocks_are_seen(get_driver, get_oracle, kind):
    """Between two requests: within one, full blocks may stand in any order once their keys are written."""

    def swap(driver: Driver) -> None:
        one, other = (driver.engine.get_request(i).sequence for i in (VICTIM, OTHER))
        mine, yours = one.block_table[1], other.block_table[1]
        one.block_table = (one.block_table[0], yours, *one.block_table[2:])
        other.block_table = (other.block_table[0], mine, *other.block_table[2:])

    driver = run(get_driver(kind, max_tokens=40), swap, after_tokens=130)
    assert_is_seen(driver, get_oracle(kind), in_states=False)


def test_reading_what_nobody_wrote_is_seen(get_driver):
    """Poison works: a block table that names an unused block gives NaN, not something plausible."""
    driver = get_driver("attention_only", max_tokens=40)
    driver.add(VICTIM, make_prompt(PROMPT_LENGTH))
    request = driver.engine.get_request(VICTIM)
    while request.computed_end < 132:
        driver.step()
    stranger = next(b for b in range(100) if driver.scheduler.blocks.references(b) == 0)
    table = request.block_table
    request.sequence.block_table = (*table[:2], stranger, *table[3:])
    driver.engine.step_modern()
    assert driver.seen[VICTIM].logits[133][0].isnan().any()
