"""Negative controls: snapshots broken in one way at a time; the comparison with the truth must turn red.

Each control runs the same prompts, two kernel chunks a block, over an engine whose skips nothing else watches. As it
is, all is equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_ext.config import CacheConfig
from megatron_ext.errors import RestoreError
from megatron_ext.mcore import context as context_module
from megatron_ext.memory import state_pool
from megatron_ext.memory.state_pool import SnapshotPool, StatePool
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import SnapshotPlaces
from megatron_ext.runner import model_input
from tests.priority import TestPriority
from tests.unit_tests.support.driver import (
    Driver,
    assert_equals_oracle,
    assert_states_equal_oracle,
    make_prompt,
)
from tests.unit_tests.support.oracle import Oracle

pytestmark = pytest.mark.priority(TestPriority.HIGH)

BLOCK, KERNEL_CHUNK = 64, 32
PROMPT, OTHER = make_prompt(3 * BLOCK + 20), make_prompt(2 * BLOCK + 20)
VICTIM, SECOND_VICTIM = 2, 3
LAYERS = [pytest.param(slice(0, 1), id="first_layer"), pytest.param(slice(1, 2), id="second_layer")]


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
        for prompt in (PROMPT, OTHER):
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
        return self.driver.context.snapshots.conv, self.driver.context.snapshots.ssm

    def play_again(self) -> None:
        for prompt in (PROMPT, OTHER):
            self._add([*prompt, *make_prompt(10, seed=1)])
        self.driver.run()
        skipped = [self.driver.records[i].skipped_prefill_token_count for i in (VICTIM, SECOND_VICTIM)]
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
def oracle(get_oracle):
    return get_oracle("hybrid")


@pytest.fixture
def build(get_driver) -> Callable[[], Control]:
    driver = get_driver("hybrid", cache=CacheConfig(snapshot_slots=10), block_size=BLOCK)
    assert driver.engine.geometry.kernel_chunk == KERNEL_CHUNK
    return functools.partial(Control, driver)


def test_nothing_is_broken(build, oracle):
    control = build()
    control.play_again()
    control.assert_is_seen(oracle)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("which", [0, 1], ids=["conv", "ssm"])
def test_a_zeroed_slot(build, oracle, which, layer):
    """Zero one kind of state of one layer: a state is all layers or nothing."""
    control = build()
    control.pools[which][layer, control.slot(0)] = 0.0
    control.play_again()
    control.assert_is_seen(oracle, VICTIM)


@pytest.mark.parametrize("layer", [*LAYERS, pytest.param(slice(0, 2), id="all_layers")])
def test_two_slots_swapped(build, oracle, layer):
    """The notes on what they hold are right, the bytes are not."""
    control = build()
    slots = [control.slot(0), control.slot(1)]
    for pool in control.pools:
        pool[layer, slots] = pool[layer, slots[::-1]].clone()
    control.play_again()
    control.assert_is_seen(oracle, VICTIM, SECOND_VICTIM)


def test_swapped_convolution_columns(build, oracle):
    """Shifted by one token."""
    control = build()
    conv, slot = control.pools[0], control.slot(0)
    conv[:, slot] = conv[:, slot].roll(-1, dims=-1)
    control.play_again()
    control.assert_is_seen(oracle, VICTIM)


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
def test_a_snapshot_of_another_position(build, oracle, monkeypatch, chunks, tokens):
    def shifted(slots: Tensor, sequences: Tensor, ends: Tensor, counts: Tensor) -> SnapshotPlaces:
        return SnapshotPlaces(slots, sequences, ends - chunks, counts - tokens)

    # The reference finds states of its scan by chunks and the convolution's by tokens, so that one alone can be wrong.
    with monkeypatch.context() as patch, SSD.backends.forced("reference"):
        patch.setattr(model_input, "SnapshotPlaces", shifted)
        control = build()
    control.play_again()
    control.assert_is_seen(oracle, VICTIM, SECOND_VICTIM)


class TestRestoring:
    """Mistakes between the snapshot slot and the running state slot."""

    @pytest.mark.parametrize("value", [0.0, torch.nan])
    def test_nothing_is_restored(self, build, oracle, monkeypatch, value):
        """Computing goes on from a zero state, or from unwritten memory."""

        def forget(
            self: SnapshotPool, slots: Sequence[int], block_hashes: object, live: StatePool, owned: list[int]
        ) -> None:
            live.conv[:, owned] = value
            live.ssm[:, owned] = value

        control = build()
        monkeypatch.setattr(SnapshotPool, "restore", forget)
        control.play_again()
        control.assert_is_seen(oracle, VICTIM, SECOND_VICTIM)

    def test_into_the_wrong_rows(self, build, oracle, monkeypatch):
        """Two requests get each other's states."""

        def swap(
            self: SnapshotPool, slots: list[int], block_hashes: list[bytes], live: StatePool, owned: list[int]
        ) -> None:
            restore(self, slots, block_hashes, live, owned[::-1])

        control = build()
        restore = SnapshotPool.restore
        monkeypatch.setattr(SnapshotPool, "restore", swap)
        control.play_again()
        control.assert_is_seen(oracle, VICTIM, SECOND_VICTIM)

    def test_the_restored_state_is_not_used(self, build, oracle, monkeypatch):
        """Every prefill is staged as if it began at token 0."""
        stage = model_input._stage_recurrent

        def forgetful(*args: object) -> object:
            step = stage(*args)
            if step.prefill_slots is not None:
                step.prefill_slots.has_initial_state.zero_()
            return step

        control = build()
        monkeypatch.setattr(model_input, "_stage_recurrent", forgetful)
        control.play_again()
        control.assert_is_seen(oracle, VICTIM, SECOND_VICTIM)


def test_a_snapshot_of_another_request_in_decode(get_driver, oracle, monkeypatch):
    """Two requests cross a block boundary in the same step; their snapshots get each other's states (EX-1, HY-6)."""

    def swap(source: StatePool, slots: Sequence[int], target: StatePool, target_slots: Sequence[int]) -> None:
        copy_states(source, slots, target, target_slots[::-1])

    copy_states = state_pool.copy_states
    monkeypatch.setattr(context_module, "copy_states", swap)
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
        assert_equals_oracle(driver, request_id, oracle)
    for request_id in (2, 3):
        assert driver.records[request_id].skipped_prefill_token_count == BLOCK
        assert_logits_are_wrong(driver, request_id, oracle)


@pytest.mark.parametrize("contents", [None, b"another"])
def test_a_slot_that_holds_something_else_is_an_error(build, oracle, contents):
    """HY-3: never a zero state; and it is said once, since the snapshot is given up then."""
    control = build()
    slot, notes = control.slot(0), control.driver.context.snapshots._contents
    notes[slot] = contents
    control._add([*PROMPT, 5])
    control._add([*OTHER, 5])
    found = "unfinished" if contents is None else "those of another"
    with pytest.raises(RestoreError, match=f"slot {slot} was to hold .* holds {found}"):
        control.driver.step()
    control.driver.engine.check()
    assert not control.driver.seen[VICTIM].chunks, "it was computed nevertheless"
    assert [r.request_id for r in control.driver.scheduler.queues.waiting] == [VICTIM, SECOND_VICTIM]
    control.driver.run()
    assert control.driver.seen[VICTIM].chunks[0][0] == 0
    assert control.driver.seen[SECOND_VICTIM].chunks[0][0] == 2 * BLOCK
    assert control.driver.events(VICTIM).count("ERROR_TRANSIENT") == 1
    control.assert_is_seen(oracle)
