"""Live states: shapes, types, bytes, and views that write through."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.memory.state_pool import StatePool, StateShape

SHAPE = StateShape(layers=3, conv=(10, 3), ssm=(2, 4, 5), conv_dtype=torch.bfloat16, ssm_dtype=torch.float32)


def test_bytes_of_one_sequence():
    assert SHAPE.bytes == 3 * (10 * 3 * 2 + 2 * 4 * 5 * 4)


@pytest.mark.parametrize("conv_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_what_the_pool_takes(conv_dtype: torch.dtype, ssm_dtype: torch.dtype):
    shape = StateShape(2, (7, 3), (3, 4, 5), conv_dtype, ssm_dtype)
    pool = StatePool(shape, rows=6, device=torch.device("cpu"))
    assert pool.conv.nbytes + pool.ssm.nbytes == 6 * shape.bytes
    assert (pool.conv.dtype, pool.ssm.dtype) == (conv_dtype, ssm_dtype)


def test_shapes():
    pool = StatePool(SHAPE, rows=4, device=torch.device("cpu"))
    assert pool.conv.shape == (3, 4, 10, 3)
    assert pool.ssm.shape == (3, 4, 2, 4, 5)
    conv, ssm = pool.layer(1)
    assert conv.shape == (4, 10, 3)
    assert ssm.shape == (4, 2, 4, 5)


def test_a_layer_writes_through_and_touches_no_other():
    pool = StatePool(SHAPE, rows=4, device=torch.device("cpu"))
    pool.conv.zero_()
    pool.ssm.zero_()
    conv, ssm = pool.layer(1)
    conv[2] = 1
    ssm[2] = 2
    assert pool.conv[1, 2].eq(1).all()
    assert pool.ssm[1, 2].eq(2).all()
    assert pool.conv.sum() == 10 * 3
    assert pool.ssm.sum() == 2 * 2 * 4 * 5
