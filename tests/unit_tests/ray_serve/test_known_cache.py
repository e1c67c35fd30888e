"""RP-3: contents of one cache by its events, blocks and snapshots in any order."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.kv_events.events import (
    AllBlocksCleared,
    AllStatesCleared,
    BlockRemoved,
    BlockStored,
    StateRemoved,
    StateStored,
)
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.ray_serve.prefix_routing import KnownCache
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router

SIZE, POOL = 4, 8
RUN = BlockStored([0, 1, 2], None, packed_tokens(range(3 * SIZE)), SIZE)


def test_a_snapshot_counts_while_its_block_is_known():
    """A snapshot may be reported first, or removed last."""
    router = Router()
    router.join("r", SIZE, has_states=True)
    cache = KnownCache(router.members["r"], 0, POOL)
    prompt = Prompt(range(4 * SIZE))

    def skipped(*steps: Iterator[None]) -> int:
        """Blocks that are skipped after events."""
        for one in steps:
            assert all(step is None for step in one)
        router.check()
        return router.route(prompt).skipped // SIZE

    take = cache.take
    assert skipped(take(StateStored([1]))) == 0
    assert skipped(take(RUN)) == 2
    assert skipped(take(AllBlocksCleared())) == 0
    assert skipped(take(RUN)) == 2, "a reset of blocks says nothing of snapshots"
    assert skipped(take(BlockRemoved([2, 1]))) == 0
    assert (len(router.members["r"].blocks), router.members["r"].states) == (1, {})
    assert skipped(take(RUN)) == 2
    assert skipped(take(BlockRemoved([2, 1])), take(StateRemoved([1])), take(RUN)) == 0
    assert skipped(take(StateStored([0, 2]))) == 3
    assert skipped(take(AllStatesCleared()), take(StateStored([0]))) == 1


def test_a_cache_that_is_cleared_leaves_the_other_one_of_its_replica():
    """RP-3: equal blocks of two ranks are reported apart."""
    router = Router()
    router.join("r", SIZE)
    caches = [KnownCache(router.members["r"], rank, POOL) for rank in (0, 1)]
    for cache in caches:
        list(cache.take(RUN))
    prompt = Prompt(range(4 * SIZE))
    for cache, left in zip(caches, (3, 0), strict=True):
        list(cache.take(AllBlocksCleared()))
        assert router.route(prompt).skipped == left * SIZE
