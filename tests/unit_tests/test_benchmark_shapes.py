"""Worst shapes of the GPU benchmark, listed and tried without a device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("benchmarks.gpu.operators")
from benchmarks.cases import Run
from benchmarks.gpu.kept_states import kept_states
from benchmarks.gpu.operators import planned_calls
from benchmarks.gpu.right import IS_RIGHT
from benchmarks.operators.calls import TINY, Sizes

WORST = (
    "attention of Nemotron-H 8B, 64 decodes at 131,072",
    "attention of Nemotron-H 8B, 64 tokens after 131,072",
    "attention of Qwen3-Next, 64 decodes at 131,072",
    "attention of Qwen3-Next, 16,384 tokens after 131,072",
    "256 tokens of 151,936 words, top_k and top_p",
    "MoE layer of 72 experts, 64 tokens",
    "MoE layer of 72 experts, 16,384 tokens",
)


def test_worst_cases_replace_mild_ones() -> None:
    """CU-13: no row of attention or sampling is at other shapes than those that kernels are checked at."""
    mild, worst = planned_calls(Sizes(), torch.bfloat16, torch.device("meta"))
    assert set(WORST) <= set(worst)
    assert not mild.keys() & worst.keys()
    assert not any(name.startswith(("attention", "tokens", "best")) for name in mild)


@pytest.mark.long
def test_each_call_can_be_made() -> None:
    """CU-13: at small shapes, of the same number and names."""
    planned = planned_calls(TINY, torch.bfloat16, torch.device("cpu"), is_quick=True)[1]
    assert planned.keys() == planned_calls(Sizes(), torch.bfloat16, torch.device("meta"))[1].keys()
    with torch.inference_mode():
        for name, make in planned.items():
            call = make()
            assert call.amount > 0, name
            call.work()


def test_kept_states_are_written_and_change_no_output() -> None:
    """CU-13: as on a device, at small sizes."""
    run = Run(quick=True)
    kept_states(run)
    assert not run.page["failed"]
    assert [row[IS_RIGHT] for row in run.page["rows"].values()] == [True] * 5
