"""SC-10, SC-11: the contract of operators with states over every backend, and what changes no bit in C++.

Pools are filled with NaN: what a backend reads without an owner, or writes beside its slots, is seen. The truth is
each operator's formula, token by token in fp64, over every sequence as a whole. `test_triton_scans.py` has Triton's.
Some shapes are odd on purpose: fewer channels than a vector has lanes, one more, more than two vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_ext.ops import cpp, triton
from tests.unit_tests.ops.backends import interpreted, usable
from tests.unit_tests.ops.oracles import assert_close
from tests.unit_tests.ops.state_cases import DECODED, DONE, KEPT, LENGTHS, LIVE, OPERATORS, Steps

FP32 = torch.float32
TYPES = [FP32, torch.bfloat16, torch.float16]
BACKENDS = [
    pytest.param(name, backend, marks=interpreted(backend))
    for name, run in OPERATORS.items()
    for backend in usable(run.backends)
]
OTHERS = [one for one in BACKENDS if one.values[1] != triton.NAME]
SIZE = 4
SIZES = {
    "causal_conv1d": [(1, 4), (16, 2), (17, 3), (70, 4)],
    "ssd": [(1, 1, 1, 1), (4, 16, 2, 16), (6, 20, 2, 9), (3, 70, 1, 24), (2, 33, 2, 5)],
    "selective_scan": [(1, 1), (16, 8), (33, 17), (20, 16)],
    "gated_delta_rule": [(1, 1, 1, 1), (2, 8, 4, 16), (1, 17, 3, 33), (2, 5, 2, 70)],
}
SHAPES = [(name, size) for name, sizes in SIZES.items() for size in sizes]
ROWS = list(range(len(LENGTHS)))
exact = pytest.mark.skipif(cpp.NAME not in usable(OPERATORS["ssd"].backends), reason="no compiler here, or a GPU")
each_shape = pytest.mark.parametrize(("name", "size"), SHAPES, ids=str)


def in_cpp(name: str, size: tuple[int, ...]) -> Steps:
    return Steps(name, size, FP32, FP32, cpp.NAME)


@pytest.mark.parametrize("states", TYPES, ids=str)
@pytest.mark.parametrize(("name", "backend"), OTHERS)
def test_steps_equal_the_formula(name: str, backend: str, states: torch.dtype) -> None:
    """HY-4, HY-7, HY-8, HY-9, HY-11, HY-14: outputs, live states and snapshots; states are rounded in the pool only."""
    Steps(name, SIZE, FP32, states, backend, gap=48).run()


@exact
@each_shape
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_steps_of_odd_shapes_equal_the_formula(name: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """SC-10: inputs of 16 bits are computed in fp32, and outputs rounded once."""
    Steps(name, size, dtype, FP32, cpp.NAME).run()


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_snapshots_beyond_two_billion_elements(name: str, backend: str) -> None:
    """An arena may be larger than 32-bit offsets reach; only the pages of snapshots are touched."""
    near, far = (Steps(name, SIZE, FP32, torch.bfloat16, backend, gap) for gap in (0, 2**31 // 6 + 16))
    for steps in (near, far):
        steps.prefill([5, 7], [0, 0], [3, 48], [(7, 48, 6)])
    assert not near.snapshots[6].isnan().any()
    torch.testing.assert_close(far.snapshots, near.snapshots, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "backend"), OTHERS)
def test_a_forgotten_initial_state_is_seen(name: str, backend: str) -> None:
    """Negative control: the second step begins with zeros."""
    steps = Steps(name, SIZE, FP32, FP32, backend)
    steps.prefill([7], [0], [DONE[7]])
    steps.live[LIVE[7]] = 0
    y = steps.prefill([7], [DONE[7]], [LENGTHS[7]])
    with pytest.raises(AssertionError):
        steps.check_outputs("second step", y, [7], [DONE[7]], [LENGTHS[7]])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@exact
@each_shape
@pytest.mark.parametrize("count", [2, 3, 5])
def test_threads_change_no_bit(name: str, size: tuple[int, ...], count: int) -> None:
    ends = [length - (row in DECODED) for row, length in enumerate(LENGTHS)]
    found = []
    for threads_of_run in (1, count):
        steps = in_cpp(name, size)
        with threads(threads_of_run):
            y = steps.prefill(ROWS, [0] * 8, ends, [KEPT[0], KEPT[2]])
            y = torch.cat([y, steps.decode(DECODED, [ends[row] for row in DECODED])])
        found.append((y, steps.live.nan_to_num(), steps.snapshots.nan_to_num()))
    assert all(map(torch.equal, *found))


@exact
@each_shape
def test_neighbours_change_no_bit(name: str, size: tuple[int, ...]) -> None:
    together, alone = in_cpp(name, size), in_cpp(name, size)
    y = together.prefill(ROWS, [0] * 8, LENGTHS)
    assert torch.equal(y, torch.cat([alone.prefill([row], [0], [LENGTHS[row]]) for row in ROWS]))
    assert torch.equal(alone.live.nan_to_num(), together.live.nan_to_num())
    decoded = together.decode([3, 0], [1, 0])
    assert torch.equal(torch.cat([alone.decode([row], [at]) for row, at in ((3, 1), (0, 0))]), decoded)


@exact
@each_shape
@pytest.mark.parametrize("cuts", [(1,), (31, 32, 33), (16, 48, 64), (2, 3, 5, 40)], ids=str)
def test_cuts_change_no_bit(name: str, size: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    """Wherever a prompt is cut into steps, off the grid of kernel chunks too: HY-14, cache on beside cache off."""
    whole, pieces = in_cpp(name, size), in_cpp(name, size)
    y = whole.prefill([7], [0], [65])
    spans = itertools.pairwise((0, *cuts, 65))
    assert torch.equal(torch.cat([pieces.prefill([7], [begin], [end]) for begin, end in spans]), y)
    assert torch.equal(pieces.live[LIVE[7]], whole.live[LIVE[7]])


@exact
@each_shape
def test_a_decoded_token_leaves_the_state_of_a_prefilled_one(name: str, size: tuple[int, ...]) -> None:
    whole, stepped = in_cpp(name, size), in_cpp(name, size)
    y = whole.prefill([7], [0], [65])
    stepped.prefill([7], [0], [60])
    got = torch.cat([stepped.decode([7], [position]) for position in range(60, 65)])
    assert_close("y", got, y[60:])
    assert torch.equal(stepped.live[LIVE[7]], whole.live[LIVE[7]])


@exact
@each_shape
def test_inputs_may_be_views(name: str, size: tuple[int, ...]) -> None:
    """Slices of a projection; and pools whose slots lie apart."""
    plain, viewed = in_cpp(name, size), in_cpp(name, size)
    viewed.live = torch.stack([viewed.live, viewed.live], 1)[:, 1]
    order = viewed.operator.order
    viewed.operator.order = lambda *tokens: order(*(torch.cat([t, t], -1)[..., t.shape[-1] :] for t in tokens))
    assert torch.equal(*(steps.prefill([5, 7], [0, 0], [40, 64]) for steps in (plain, viewed)))
    assert torch.equal(*(steps.decode([7, 5], [64, 40]) for steps in (plain, viewed)))
    assert torch.equal(viewed.live.nan_to_num(), plain.live.nan_to_num())


@exact
@each_shape
def test_shapes_that_do_not_fit_are_refused(name: str, size: tuple[int, ...]) -> None:
    """Such shapes are refused as in plain torch: memory of others is not read."""
    steps = in_cpp(name, size)
    order = steps.operator.order
    steps.operator.order = lambda *given: tuple(
        t if i else t.repeat_interleave(2, -1) for i, t in enumerate(order(*given))
    )
    with pytest.raises(RuntimeError):
        steps.prefill([1], [0], [3])
    steps.operator.order, steps.live = order, steps.live[:1]
    with pytest.raises((IndexError, RuntimeError)):
        steps.prefill([7], [0], [3])
