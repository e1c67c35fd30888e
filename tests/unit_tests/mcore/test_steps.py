"""Single steps: one varlen call, padding without effect, slices shorter than the window."""

from __future__ import annotations

import itertools

import pytest

from megatron_ext.ops.recurrence import Recurrence
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import PrefillStates
from tests.on_request import long_except
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

MAMBA_LAYERS = 2


def test_all_prefill_of_a_step_is_one_varlen_call_per_layer(get_driver, get_oracle, monkeypatch):
    """HY-7, HY-11: fresh and continuing sequences together, each with its own initial states; none for decodes."""
    calls: list[tuple[int, ...]] = []
    prefill = Recurrence.prefill

    def count(operator: Recurrence, *inputs: object, states: PrefillStates, **options: object) -> object:
        if operator is SSD:
            lengths = states.chunks.sequences.lengths
            calls.append(lengths)
            assert states.slots.has_initial_state.shape[0] == len(lengths)
        return prefill(operator, *inputs, states=states, **options)

    monkeypatch.setattr(Recurrence, "prefill", count)
    driver = get_driver(max_tokens=100)
    for request_id, length in enumerate((3, 1, 129, 20, 64)):
        driver.add(request_id, make_prompt(length))
    per_step = []
    while driver.engine.has_unfinished_requests():
        calls.clear()
        driver.step()
        per_step.append(list(calls))
    monkeypatch.undo()
    # 96 of the 129 in the first step; then two decodes leave 98 for the rest of it, for 20 and for 45 of 64.
    assert per_step[0] == [(3, 1, 96)] * MAMBA_LAYERS
    assert per_step[1] == [(33, 20, 45)] * MAMBA_LAYERS
    assert per_step[2] == [(19,)] * MAMBA_LAYERS
    assert not any(per_step[3:])
    for request_id in range(5):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


class TestShortSlices:
    """FX-4, HY-8: prefill of fewer tokens than the convolution window reaches back to older columns."""

    @pytest.mark.parametrize(
        ("kind", "slice_length"),
        long_except(
            [("hybrid", 1), ("attention_free", 2), ("hybrid", 3), ("attention_free", 4), ("hybrid", 5)],
            itertools.product(("hybrid", "attention_free"), range(1, 6)),
        ),
    )
    def test_a_whole_prompt_in_slices(self, get_driver, get_oracle, kind, slice_length):
        driver = get_driver(kind, max_tokens=slice_length, max_requests=1)
        for request_id, length in enumerate((1, 2, 3, 4, 5, 17)):
            driver.add(request_id, make_prompt(length), num_tokens_to_generate=4)
        driver.run()
        for request_id, length in enumerate((1, 2, 3, 4, 5, 17)):
            prefill = [end - start for start, end in driver.seen[request_id].chunks if start < length]
            assert prefill[0] == min(length, slice_length)
            assert_equals_oracle(driver, request_id, get_oracle(kind))


class TestBlockSizes:
    """HY-12: any multiple of 16 does for a hybrid; the kernel chunk is the model's."""

    @pytest.mark.parametrize("block_size", [48, 80, 256])
    def test_results_do_not_depend_on_it(self, get_driver, get_oracle, block_size):
        driver = get_driver(block_size=block_size, max_tokens=50)
        assert driver.engine.plan.world.kernel_chunk == 32
        for request_id, length in enumerate((17, 63, 129)):
            driver.add(request_id, make_prompt(length))
        driver.run()
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))

    @pytest.mark.parametrize("block_size", [1, 5, 24])
    def test_attention_takes_any(self, get_driver, get_oracle, block_size):
        driver = get_driver("attention_only", block_size=block_size, block_count=300, max_tokens=50)
        for request_id, length in enumerate((5, 63, 129)):
            driver.add(request_id, make_prompt(length))
        driver.run()
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, get_oracle("attention_only"))
