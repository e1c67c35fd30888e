"""Live states and snapshots: shapes, types, bytes, views that write through, copies, and what a slot holds."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.errors import RestoreError
from megatron_ext.memory.state_pool import SnapshotPool, StatePool, StateShape, copy_states

SHAPE = StateShape(layers=3, conv=(10, 3), ssm=(2, 4, 5), conv_dtype=torch.bfloat16, ssm_dtype=torch.float32)


@pytest.mark.parametrize("ssm", [(3, 4, 5), (20, 3)])
@pytest.mark.parametrize("conv_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.bfloat16])
def test_bytes_equal_the_memory_of_the_pool(ssm: tuple[int, ...], conv_dtype: torch.dtype, ssm_dtype: torch.dtype):
    shape = StateShape(2, (7, 3), ssm, conv_dtype, ssm_dtype)
    pool = StatePool(shape, rows=6, device=torch.device("cpu"))
    assert pool.conv.nbytes + pool.ssm.nbytes == 6 * shape.bytes
    assert (pool.conv.dtype, pool.ssm.dtype) == (conv_dtype, ssm_dtype)


CPU = torch.device("cpu")


def filled(pool: StatePool, offset: float) -> StatePool:
    """Another number in each layer of each row."""
    numbers = torch.arange(pool.conv.shape[0] * pool.conv.shape[1]).view(pool.conv.shape[:2]) + offset
    pool.conv.copy_(numbers[..., None, None].expand_as(pool.conv))
    pool.ssm.copy_(numbers[..., None, None, None].expand_as(pool.ssm))
    return pool


def test_a_copy_takes_all_layers_of_whole_rows_and_nothing_else():
    """Rows 4 and 0 of the one to rows 1 and 2 of the other."""
    source, target = filled(StatePool(SHAPE, 5, CPU), 0), filled(StatePool(SHAPE, 4, CPU), 100)
    before = target.conv.clone(), target.ssm.clone()
    copy_states(source, [4, 0], target, [1, 2])
    for name, old in zip(("conv", "ssm"), before, strict=True):
        new, origin = getattr(target, name), getattr(source, name)
        assert torch.equal(new[:, 1], origin[:, 4])
        assert torch.equal(new[:, 2], origin[:, 0])
        assert torch.equal(new[:, [0, 3]], old[:, [0, 3]])


class TestSnapshots:
    """A restore is for the states of one block hash, and of no other."""

    def pools(self) -> tuple[SnapshotPool, StatePool]:
        return filled(SnapshotPool(SHAPE, 4, CPU), 0), filled(StatePool(SHAPE, 4, CPU), 100)

    def test_a_slab_that_changes_its_type_has_no_snapshot(self):
        """HY-3: blocks overwrite it; what it held can be restored no more, what others hold can."""
        snapshots, live = SnapshotPool(SHAPE, 6, CPU), StatePool(SHAPE, 4, CPU)
        hashes = [bytes([slot]) for slot in range(6)]
        snapshots.close(range(6), hashes)
        snapshots.forget_slabs([2, 3, 4, 5], {4})
        for slot in (2, 3, 5):
            with pytest.raises(RestoreError, match="unfinished"):
                snapshots.restore([slot], [hashes[slot]], live, [0])
        snapshots.check([0, 1, 4], [hashes[slot] for slot in (0, 1, 4)])

    @pytest.mark.parametrize(
        ("block_hash", "found"), [(b"one", "another"), (b"two", "unfinished"), (b"never", "unfinished")]
    )
    def test_anything_else_is_an_error_and_touches_no_row(self, block_hash: bytes, found: str):
        """HY-3: never a zero state, never another one."""
        snapshots, live = self.pools()
        snapshots.close([1, 2], [b"two", b"two"])
        snapshots.open([2])
        snapshots.close([3], [b"right"])
        slot = {b"one": 1, b"two": 2, b"never": 0}[block_hash]
        before = live.ssm.clone()
        with pytest.raises(RestoreError, match=found) as caught:
            snapshots.restore([3, slot], [b"right", block_hash], live, [0, 1])
        assert caught.value.block_hash == block_hash
        assert not any(one.hex() in str(caught.value) for one in (b"one", b"two", b"never")), "SE-3: it goes into logs"
        assert torch.equal(live.ssm, before)
