"""Every comparison can fail: an engine whose pools are corrupted between two steps must not equal the oracle.

Each control runs twice. As it is, everything is equal; with the corruption, the comparison of logits raises. Where the
corruption is one of states, the comparison of states alone raises too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.config import CacheConfig
from megatron_ext.errors import RestoreError
from megatron_ext.memory import state_pool, step_states
from megatron_ext.memory.state_pool import StatePool
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import SnapshotPlaces
from megatron_ext.runner import model_input
from tests.unit_tests.support.driver import (
    Driver,
    assert_equals_oracle,
    assert_states_equal_oracle,
    make_prompt,
)
from tests.unit_tests.support.oracle import Oracle

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
    return driver.engine.get_request(request_id).running_slot


LAYERS = [
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


@pytest.mark.parametrize(
    ("which", "layer", "moment"),
    [("ssm", 0, 132), ("ssm", 1, 80), ("conv", 0, 80), ("conv", 1, 132)],
    ids=["ssm-first_layer-decode", "ssm-second_layer-prefill", "conv-first_layer-prefill", "conv-second_layer-decode"],
)
def test_a_zeroed_state_is_seen(hybrid, get_oracle, which, layer, moment):
    def zero(driver: Driver) -> None:
        getattr(driver.context.allocated.live_states, which)[layer, slot(driver)] = 0.0

    run(hybrid, zero, after_tokens=moment)
    assert_is_seen(hybrid, get_oracle("hybrid"), in_states=True)
    if which == "ssm" or moment > PROMPT_LENGTH:
        assert_logits_differ(hybrid, get_oracle("hybrid"))
    assert_equals_oracle(hybrid, OTHER, get_oracle("hybrid"))


@pytest.mark.parametrize(("which", "layer"), [("ssm", 0), ("conv", 1)])
def test_two_swapped_rows_are_seen(hybrid, get_oracle, which, layer):
    def swap(driver: Driver) -> None:
        states = getattr(driver.context.allocated.live_states, which)[layer]
        slots = [slot(driver, VICTIM), slot(driver, OTHER)]
        states[:, slots] = states[:, slots[::-1]].clone()

    run(hybrid, swap, after_tokens=130)
    assert_is_seen(hybrid, get_oracle("hybrid"), in_states=True)
    assert_logits_differ(hybrid, get_oracle("hybrid"))
    with pytest.raises(AssertionError):
        assert_equals_oracle(hybrid, OTHER, get_oracle("hybrid"))


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


def test_detects_reads_of_unwritten_keys(get_driver):
    """Poison works: a block table that names an unused block gives NaN, not something plausible."""
    driver = get_driver("attention_only", max_tokens=40)
    driver.add(VICTIM, make_prompt(PROMPT_LENGTH))
    request = driver.engine.get_request(VICTIM)
    while request.computed_end < 132:
        driver.step()
    stranger = next(b for b in range(100) if driver.scheduler.cache.pool.references(b) == 0)
    table = request.block_table
    request.block_table = (*table[:2], stranger, *table[3:])
    driver.engine.step_modern()
    assert driver.seen[VICTIM].logits[133][0].isnan().any()


# Snapshots: two prompts, and both again with other ends, which resume; two kernel chunks a block

BLOCK, KERNEL_CHUNK = 64, 32
PROMPT, SECOND = make_prompt(3 * BLOCK + 20), make_prompt(2 * BLOCK + 20)
RESUMED, ALSO_RESUMED = 2, 3


def assert_logits_are_wrong(driver: Driver, request_id: int, oracle: Oracle) -> None:
    """The comparison is red, and already the prompt's own logits are far from the truth, or NaN."""
    with pytest.raises(AssertionError, match=r"logits of token|^token"):
        assert_equals_oracle(driver, request_id, oracle)
    prompt = driver.records[request_id].prompt_tokens
    difference = (driver.seen[request_id].logits[len(prompt)][0] - oracle.logits(prompt)[-1]).abs().max()
    assert not difference < 1e-3, difference


class Control:
    """Two prompts are served; then both again, each with another end, which makes them resume from snapshots."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.requests = []
        for prompt in (PROMPT, SECOND):
            self._add(prompt)
            driver.run()

    def _add(self, prompt: list[int]) -> None:
        request_id = len(self.requests)
        self.driver.add(request_id, prompt, num_tokens_to_generate=4, skip_prompt_log_probs=True)
        self.requests.append(self.driver.engine.get_request(request_id))

    def slot(self, request_id: int) -> int:
        """Snapshot slot at the last boundary of one of the two prompts."""
        block_hash = self.requests[request_id].block_hashes[(3, 2)[request_id] - 1]
        return self.driver.scheduler.cache.states.find(block_hash)

    @property
    def pools(self) -> tuple[Tensor, Tensor]:
        return self.driver.context.allocated.snapshots.conv, self.driver.context.allocated.snapshots.ssm

    def play_again(self) -> None:
        for prompt in (PROMPT, SECOND):
            self._add([*prompt, *make_prompt(10, seed=1)])
        self.driver.run()
        skipped = [self.driver.records[i].skipped_prefill_token_count for i in (RESUMED, ALSO_RESUMED)]
        assert skipped == [3 * BLOCK, 2 * BLOCK]

    def assert_is_seen(self, oracle: Oracle, *victims: int) -> None:
        """The victims' logits are wrong, and so are their states; the others are as they should be."""
        for request_id in range(4):
            if request_id in victims:
                assert_logits_are_wrong(self.driver, request_id, oracle)
                with pytest.raises(AssertionError, match="states of request"):
                    assert_states_equal_oracle(self.driver, request_id, oracle)
            else:
                assert_equals_oracle(self.driver, request_id, oracle)


@pytest.fixture
def build(get_driver) -> Callable[[], Control]:
    driver = get_driver("hybrid", cache=CacheConfig(snapshot_slots=10), block_size=BLOCK)
    assert driver.engine.plan.world.kernel_chunk == KERNEL_CHUNK
    return functools.partial(Control, driver)


def test_snapshots_as_they_are_are_right(build, get_oracle):
    control = build()
    control.play_again()
    control.assert_is_seen(get_oracle("hybrid"))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("which", [0, 1], ids=["conv", "ssm"])
def test_a_zeroed_snapshot_is_seen(build, get_oracle, which, layer):
    """Zero one kind of state of one layer: a state is all layers or nothing."""
    control = build()
    control.pools[which][layer, control.slot(0)] = 0.0
    control.play_again()
    control.assert_is_seen(get_oracle("hybrid"), RESUMED)


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        pytest.param(BLOCK // KERNEL_CHUNK, BLOCK, id="a_block_early"),
        pytest.param(1, KERNEL_CHUNK, id="a_kernel_chunk_early"),
        pytest.param(1, 0, id="only_the_ssm_state_a_kernel_chunk_early"),
        pytest.param(0, 1, id="only_the_convolution_state_a_token_early"),
        pytest.param(0, -1, id="only_the_convolution_state_a_token_late"),
    ],
)
def test_a_snapshot_of_another_position(build, get_oracle, monkeypatch, chunks, tokens):
    def shifted(slots: Tensor, offsets: Tensor, ends: Tensor, counts: Tensor) -> SnapshotPlaces:
        return SnapshotPlaces(slots, offsets, ends - chunks, counts - tokens)

    # The reference finds states of its scan by chunks and the convolution's by tokens, so that one alone can be wrong.
    with monkeypatch.context() as patch, SSD.backends.forced("reference"):
        patch.setattr(model_input, "SnapshotPlaces", shifted)
        control = build()
    control.play_again()
    control.assert_is_seen(get_oracle("hybrid"), RESUMED, ALSO_RESUMED)


def test_a_snapshot_of_another_request_in_decode(get_driver, get_oracle, monkeypatch):
    """Two requests cross a block boundary in the same step; their snapshots get each other's states (EX-1, HY-6)."""

    def swap(source: StatePool, slots: Sequence[int], target: StatePool, target_slots: Sequence[int]) -> None:
        copy_states(source, slots, target, target_slots[::-1])

    copy_states = state_pool.copy_states
    monkeypatch.setattr(step_states, "copy_states", swap)
    driver = get_driver("hybrid", cache=CacheConfig(snapshot_slots=10), block_size=BLOCK)
    prompts = [make_prompt(BLOCK - 3, seed=seed) for seed in range(2)]
    for request_id, prompt in enumerate(prompts):
        driver.add(request_id, prompt, skip_prompt_log_probs=True)
    driver.run()
    for request_id, prompt in enumerate(prompts):
        turn = [*prompt, *driver.records[request_id].generated_tokens, 5]
        driver.add(2 + request_id, turn, skip_prompt_log_probs=True)
    driver.run()
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
    for request_id in (2, 3):
        assert driver.records[request_id].skipped_prefill_token_count == BLOCK
        assert_logits_are_wrong(driver, request_id, get_oracle("hybrid"))


@pytest.mark.parametrize("contents", [None, b"another"])
def test_a_slot_that_holds_something_else_is_an_error(build, get_oracle, contents):
    """HY-3: never a zero state; and it is said once, since the snapshot is given up then."""
    control = build()
    slot, notes = control.slot(0), control.driver.context.allocated.snapshots._contents
    notes[slot] = contents
    control._add([*PROMPT, 5])
    control._add([*SECOND, 5])
    found = "unfinished" if contents is None else "the states of another"
    with pytest.raises(RestoreError, match=f"slot {slot} should hold .* holds {found}"):
        control.driver.step()
    control.driver.engine.check()
    assert not control.driver.seen[RESUMED].chunks, "it was computed nevertheless"
    assert [r.request_id for r in control.driver.scheduler.queues.waiting] == [RESUMED, ALSO_RESUMED]
    control.driver.run()
    assert control.driver.seen[RESUMED].chunks[0][0] == 0
    assert control.driver.seen[ALSO_RESUMED].chunks[0][0] == 2 * BLOCK
    assert control.driver.events(RESUMED).count("ERROR_TRANSIENT") == 1
    control.assert_is_seen(get_oracle("hybrid"))
