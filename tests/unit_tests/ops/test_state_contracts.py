"""The contract of operators with states, over every backend there is: prefill and decode in pools of slots.

Pools are filled with NaN: what a backend reads without an owner, or writes beside its slots, is seen. The truth is
each operator's formula, token by token in fp64, over every sequence as a whole. `test_triton_scans.py` has Triton's.
"""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops import triton
from tests.unit_tests.ops.backends import interpreted, usable
from tests.unit_tests.ops.state_cases import DONE, LENGTHS, LIVE, OPERATORS, Steps

TYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKENDS = [
    pytest.param(name, backend, marks=interpreted(backend))
    for name, run in OPERATORS.items()
    for backend in usable(run.backends)
]
OTHERS = [one for one in BACKENDS if one.values[1] != triton.NAME]
SIZE = 4


@pytest.mark.parametrize("states", TYPES, ids=str)
@pytest.mark.parametrize(("name", "backend"), OTHERS)
def test_steps_equal_the_formula(name: str, backend: str, states: torch.dtype) -> None:
    """HY-4, HY-7, HY-8, HY-9, HY-11, HY-14: outputs, live states and snapshots; states are rounded in the pool only."""
    Steps(name, SIZE, torch.float32, states, backend, gap=48).run()


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_snapshots_beyond_two_billion_elements(name: str, backend: str) -> None:
    """An arena may be larger than 32-bit offsets reach; only the pages of snapshots are touched."""
    near, far = (Steps(name, SIZE, torch.float32, torch.bfloat16, backend, gap) for gap in (0, 2**31 // 6 + 16))
    for steps in (near, far):
        steps.prefill([5, 7], [0, 0], [3, 48], [(7, 48, 6)])
    assert not near.snapshots[6].isnan().any()
    torch.testing.assert_close(far.snapshots, near.snapshots, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "backend"), OTHERS)
def test_a_forgotten_initial_state_is_seen(name: str, backend: str) -> None:
    """Negative control: the second step begins with zeros."""
    steps = Steps(name, SIZE, torch.float32, torch.float32, backend)
    steps.prefill([7], [0], [DONE[7]])
    steps.live[LIVE[7]] = 0
    y = steps.prefill([7], [DONE[7]], [LENGTHS[7]])
    with pytest.raises(AssertionError):
        steps.check_outputs("second step", y, [7], [DONE[7]], [LENGTHS[7]])
