"""CU-2: no two programs of a launch share a cell that one of them writes; seen under the interpreter."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops import triton
from megatron_ext.ops.triton.kernel_registry import all_kernels
from tests.unit_tests.support.kernel_races import SharedCellError, no_shared_cells
from tests.unit_tests.support.planted_kernels import both_write, one_reads, separate
from tools.kernel_checks.layer_calls import Calls
from tools.kernel_checks.sizes import Attention, DeltaNet, Mamba2, Model, Step

pytestmark = pytest.mark.skipif(not triton.is_interpreted(), reason="kernels are not interpreted here")
"""Other kernels, and all branches of these, are checked in `make test-kernels` (the folder's conftest.py)."""

MAMBA = Model("Mamba-2", 48, 70, Attention(4, 2, 16, 16), Mamba2(2, 4, 16, 2, 16), mlp=40)
DELTA_NET = DeltaNet(2, 4, 2, 16)
DELTA = Model("delta net", 48, 70, Attention(2, 2, 32, 16), DELTA_NET, mlp=40, gated=False, experts=6, chosen=3)
DECODE, PREFILL = Step(3, 0, 70, is_captured=False), Step(0, 66, 64, is_captured=False)
SHOWN = {
    *("paged_decode_split", "merge_splits", "paged_prefill", "rotate_and_write", "copy_states"),
    *("best_words", "sum_words", "gather_words", "draw_rows"),
    *("conv_prefill", "conv_states", "conv_decode", "ssd_decode", "chunk_cumsum", "state_passing", "chunk_scan"),
    *("delta_tiles", "delta_prefill", "delta_decode", "step_sizes", "delta_decays", "norm_rows", "add_norm_rows"),
    *("relu_squared", "gate_rows", "choose_experts", "sort_by_expert", "combine"),
}


@pytest.mark.long
def test_no_two_programs_share_a_cell() -> None:
    """Decodes and a prefill of one layer of each kind, in bf16, with a snapshot within the prefill."""
    with no_shared_cells() as launched:
        for model in (MAMBA, DELTA):
            for step, operators in ((DECODE, ()), (PREFILL, ("attention", "recurrence"))):
                calls = dict(Calls(model, step, device="cpu").all())
                for name in operators or calls:
                    calls[name]()
    assert set(launched) == SHOWN
    assert {kernel.name for kernel in all_kernels()} >= SHOWN


def test_shared_cells_are_found() -> None:
    """Negative controls: a cell with two writers, and one that another program reads; a cell that all read is fine."""
    x = torch.zeros(5)
    with no_shared_cells() as launched:
        with pytest.raises(SharedCellError, match=r"programs 0 and 1 of both_write write the same cell"):
            both_write[(4,)](x)
        with pytest.raises(SharedCellError, match=r"program 0 of one_reads reads a cell that program 1 writes"):
            one_reads[(4,)](x)
        separate[(4,)](x)
    assert launched == ["separate"]
