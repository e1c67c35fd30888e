"""CU-3: work, depth, addresses and alignment of launches at the sizes of real models, without memory of that size.

`make kernels` looks at all models and steps (`tools/kernel_checks`); here are those that are worst for attention, and
kernels that break each limit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_ext.ops import triton
from megatron_ext.ops.triton.kernel_registry import Kernel, config
from tests.unit_tests.support.planted_kernels import (
    mostly_idle,
    narrow_offset,
    over_all_keys,
    while_over_all_keys,
    wide_offset,
)
from tools.kernel_checks.figures import row_of, rows_of, rows_of_many
from tools.kernel_checks.known import KNOWN
from tools.kernel_checks.layer_calls import Calls
from tools.kernel_checks.sizes import MODELS, Model, Step
from tools.kernel_checks.virtual_launch import MadeBytes, Recorded, measure, recording

pytestmark = [
    pytest.mark.skipif(not triton.is_interpreted(), reason="kernels are not interpreted here"),
    pytest.mark.long,
]

DECODE, WARM = Step(64, 0, 2048, is_captured=True), Step(0, 64, 131_072, is_captured=True)


@pytest.mark.parametrize("step", [DECODE, WARM], ids=lambda step: step.name)
def test_attention_breaks_no_other_limit(step: Step) -> None:
    """The limits that attention breaks are those that are known."""
    found = {row.kernel: set(row.problems) for row in rows_of(MODELS[0], step, ("attention",))}
    assert {(kernel, problem) for kernel, problems in found.items() for problem in problems} <= KNOWN
    assert set(found) == {"paged_prefill" if step is WARM else "paged_decode_split", "merge_splits"}


@pytest.mark.parametrize("step", [DECODE, Step(0, 16_384, 131_072, is_captured=False)], ids=lambda step: step.name)
def test_experts_break_no_limit(step: Step) -> None:
    """CU-26: 72 experts, 10 of them for each token; a program sorts all pairs."""
    granite = next(model for model in MODELS if model.experts == 72)
    found = {row.kernel: row for row in rows_of(granite, step, ("experts",))}
    assert list(found) == ["choose_experts", "sort_by_expert", "combine"]
    assert {problem for row in found.values() for problem in row.problems} == set()
    assert found["sort_by_expert"].trips == -(-step.rows * 10 // 4096)
    assert found["combine"].programs == step.rows * 32


def test_rows_of_experts_beyond_those_that_there_are_are_found() -> None:
    """CU-26: the last place is addressed, so the check sees where it leads."""
    granite = next(model for model in MODELS if model.experts == 72)
    with recording() as launches:
        dict(Calls(granite, DECODE).all())["experts"]()
    (launch,) = [one for one in launches if one.kernel.name == "combine"]
    places = launch.arguments["places"]
    assert isinstance(places, torch.Tensor)
    wrong = dataclasses.replace(launch, arguments={**launch.arguments, "places": places + 1})
    assert problems(launch) == ()
    (problem,) = problems(wrong)
    assert problem.startswith("address: combine")


@pytest.mark.parametrize("model", [MODELS[0], MODELS[2]], ids=lambda model: model.name)
def test_no_program_loops_over_states_of_other_prefills(model: Model) -> None:
    """CU-27: twice the prefills, or twice the states that each of them keeps, as if each were alone."""
    for prefills, snapshots in ((8, 3), (4, 6)):
        step = Step(0, 192, 131_072, is_captured=False, prefills=prefills, snapshots=snapshots)
        found = {row.kernel: row for row in rows_of_many(model, step)}
        assert {"conv_states", "state_passing" if model is MODELS[0] else "delta_prefill"} <= found.keys()
        assert {problem for row in found.values() for problem in row.problems} == set()
        assert found["conv_states"].trips == snapshots


def launch_of(function: Any, programs: int, x: torch.Tensor, n: int) -> Recorded:
    """Record a launch of a kernel of (x, n)."""
    kernel = Kernel(function.__name__, function, {"x": "fp32"}, ("n",), (), (), ({},), (ALIGNED,))
    with recording() as launches:
        kernel.launch((programs,), ALIGNED, x=x, n=n)
    (launch,) = launches
    return launch


ALIGNED = config(aligned=True)
LARGE = 3 << 30


def large() -> torch.Tensor:
    """Return a tensor whose last elements an int32 cannot count."""
    return torch.empty(LARGE, device="meta")


def problems(launch: Recorded) -> tuple[str, ...]:
    return row_of(launch, MODELS[0], DECODE, 0).problems


def test_idle_programs_are_found() -> None:
    """A grid with 1 % useful programs, and one with 90 %."""
    assert problems(launch_of(mostly_idle, 100_000, large(), 1008)) == ("useful",)
    assert problems(launch_of(mostly_idle, 100_000, large(), 90_000)) == ()


@pytest.mark.parametrize("function", [over_all_keys, while_over_all_keys])
def test_a_loop_over_all_keys_is_found(function: Any) -> None:
    """The inner loop's trips are counted for each trip of the outer one; few trips of a `range` run."""
    launch = launch_of(function, 8, large(), 131_072)
    assert measure(launch).trips == 2 * 4096
    assert problems(launch) == ("depth",)


def test_offsets_of_32_bits_are_found() -> None:
    """A product that overflows leaves the tensor; the same in 64 bits does not, nor are strides beyond int32 missed."""
    row = LARGE // 3000 // 16 * 16
    (problem,) = problems(launch_of(narrow_offset, 3000, large(), row))
    assert problem.startswith("address: narrow_offset")
    assert problems(launch_of(wide_offset, 3000, large(), row)) == ()
    assert problems(launch_of(wide_offset, 1, large(), 1 << 31)) == ("n beyond int32",)


def test_arguments_that_are_not_aligned_are_found() -> None:
    """A configuration that is compiled for multiples of 16 only gets another tensor and another number."""
    assert problems(launch_of(mostly_idle, 8, large()[1:], 24)) == ("x misaligned", "n misaligned")
    assert problems(launch_of(mostly_idle, 8, large()[4:], 32)) == ()


def test_temporaries_are_counted() -> None:
    """Bytes of what is made, once for each storage; views and results in place make none."""
    with MadeBytes() as made:
        x = torch.empty(1000, device="meta")
        x[3:].zero_()
        with MadeBytes.uncounted():
            torch.empty(10**9, device="meta")
        x.view(10, 100).add(1)
    assert made.total == 8000
    launch = launch_of(mostly_idle, 8, large(), 16)
    assert row_of(launch, MODELS[0], DECODE, 300 << 20).problems == ("bytes",)
