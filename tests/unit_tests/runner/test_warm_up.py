"""CU-20, EX-6: steps of a warm-up and of a profile run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runner.input_writer import StagingRules
from megatron_ext.runner.warm_up import full_steps, step_classes

BLOCKS = 9
RULES = StagingRules(
    block_size=16,
    dummy_block=BLOCKS,
    kernel_chunk=2,
    has_states=True,
    snapshots_in_prefill=True,
    device=torch.device("cpu"),
)


def plan_of(requests: int, tokens: int, longest: int = 96) -> SimpleNamespace:
    """The part of a plan that these steps depend on."""
    limits = SimpleNamespace(max_requests=requests, max_tokens=tokens, max_model_len=longest)
    return SimpleNamespace(limits=limits, snapshot_slots=8, shape=SimpleNamespace(dtype=torch.float32))


def test_no_step_is_larger_than_requests_can_make_it():
    """CU-20: each with states inside a prefill and without."""
    found = {(one.decodes, one.tokens, one.keeps) for one in step_classes(plan_of(1, 3), RULES)}
    plain = {(1, 0, False), (0, 1, False), (0, 2, False), (0, 3, False)}
    assert found == plain | {(0, 2, True), (0, 3, True)}


@pytest.mark.parametrize(("tokens", "longest", "prefills"), [(40, 96, [40]), (40, 16, [16, 16, 8]), (12, 96, [12])])
def test_full_steps_are_the_largest(tokens, longest, prefills):
    """EX-6."""
    whole, short, decodes = full_steps(plan_of(12, tokens, longest), RULES)
    assert [(one.start, one.end) for one in whole.chunks] == [(0, length) for length in prefills]
    assert [(one.start, one.end) for one in short.chunks] == [(longest - min(tokens, longest), longest)]
    assert [(one.start, one.end) for one in decodes.chunks] == [(longest - 1, longest)] * 12
    assert [one.num_decode for one in (whole, short, decodes)] == [0, 0, 12]
    assert {block for step in (whole, short, decodes) for one in step.chunks for block in one.block_ids} == {BLOCKS}
