"""Block pool: owners of blocks, and detection of corruption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_ext.prefix_cache.block_pool import BlockPool


class TestContract:
    def test_no_block_is_released_twice(self):
        pool = BlockPool(3)
        blocks = pool.allocate(2)
        pool.release(blocks)
        with pytest.raises(AssertionError, match="more often than taken"):
            pool.release([blocks[0]])

    @settings(max_examples=100, deadline=None)
    @given(data=st.data(), total=st.integers(1, 6))
    def test_owners_never_meet(self, data: st.DataObject, total: int):
        pool = BlockPool(total)
        held: list[int] = []
        for _ in range(data.draw(st.integers(0, 20))):
            if data.draw(st.booleans()):
                held += pool.allocate(data.draw(st.integers(0, pool.free_count)))
            else:
                gone = data.draw(st.sets(st.sampled_from(held))) if held else set()
                pool.release(gone)
                held = [block for block in held if block not in gone]
            assert max(Counter(held).values(), default=1) == 1
            assert pool.free_count == total - len(held)
            assert all(pool.references(block) == (block in held) for block in range(total))
            pool.check()


def free_a_used_block(pool: BlockPool) -> None:
    pool._free._free.append(0)


def lose_a_block(pool: BlockPool) -> None:
    pool._free._free.pop()


def forget_a_reference(pool: BlockPool) -> None:
    pool._references[0] = 0


def owe_a_reference(pool: BlockPool) -> None:
    pool._references[3] = -1


CORRUPTIONS = [
    free_a_used_block,
    lose_a_block,
    forget_a_reference,
    owe_a_reference,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_check_finds(corrupt: Callable[[BlockPool], None]):
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check()
