"""Random requests to a model whose blocks and snapshots share one memory, checked by contents.

The machine is that of hybrid models. It takes from the scheduler how many cached blocks go, and checks that these are
unused ones, each after those that continue it and after older ones. Blocks and slots lose their contents when their
slab changes its type, and are copied only as the step's message says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import initialize, run_state_machine_as_test

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import make_limits, request_of, step
from tests.unit_tests.scheduling.cache_model import Key, Memory, Owner, World
from tests.unit_tests.scheduling.test_hybrid_machine import COMMON, HybridMachine


class SlabWorld(World):
    """World in which the scheduler chooses what is evicted."""

    scheduler: Scheduler
    hash_of: Callable[[Key], BlockHash]

    @property
    def available(self) -> int:
        return self.scheduler.cache.available_count

    def take(self, owner: Owner, count: int) -> None:
        owner.table += range(self._next_block, self._next_block + count)
        self._next_block += count

    def note_times(self) -> None:
        """Note when blocks became evictable before a step, which may spare some."""
        self.last_release, self.last_time = self._clock, max(map(self.time_of, self.left_at), default=-1)

    def time_of(self, key: Key) -> int:
        cache = self.scheduler.cache
        return cache.unused._times[cache.index.find(self.hash_of(key))]

    def follow_evictions(self) -> None:
        gone = [key for key in self.cached if self.scheduler.cache.index.find(self.hash_of(key)) is None]
        assert self.left_at.keys() >= set(gone), "a block is evicted that is in use"
        times = {key: self.left_at.pop(key) for key in gone}
        renewed = {key for key in self.left_at if self.time_of(key) > self.last_time}
        oldest = min([self.left_at[key] for key in self.left_at.keys() - renewed], default=math.inf)
        assert max([times[key] for key in times.keys() - self.spared], default=0) <= oldest, (
            "a block goes before an older one"
        )
        assert self.spared.isdisjoint(gone) or self.left_at.keys() <= self.spared, "a spared block goes before others"
        for key in sorted(renewed, key=self.time_of):
            assert key in self.spared or self.left_at[key] > self.last_release, "a block is spared for no request"
            self._clock += 1
            self.left_at[key] = self._clock
        for key in gone:
            del self.cached[key]
        self.evicted += len(gone)
        assert all(key[1][: -self.size] in self.starts(key[0]) for key in self.cached), "evicted before its children"

    def starts(self, salt: str | None) -> set[tuple[int, ...]]:
        return {(), *(tokens for other, tokens in self.cached if other == salt)}


class SlabMachine(HybridMachine):
    """Follows the contents of blocks and slots through changes of slabs."""

    slot_counts = st.none()

    def __init__(self) -> None:
        super().__init__()
        self.stale: dict[int, object] = {}  # contents of slots that the step has restored before they went
        self.are_copies_lost = False

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.limits = self.draw_limits(data)
        self.scheduler = Scheduler(self.limits, EvictionPolicyName.LRU, b"model")
        self.world = SlabWorld(self.limits.block_size, self.limits.total_blocks, EvictionPolicyName.LRU)
        self.world.scheduler = self.scheduler
        self.world.hash_of = self.block_hashes.__getitem__
        self.memory = Memory(self.limits.block_size)
        self.highest_charge = 0
        self.hits = self.matched = self.waits = self.preemptions = self.pauses = 0

    def draw_limits(self, data: st.DataObject) -> SchedulerLimits:
        limits = super().draw_limits(data)
        blocks_per_slab = data.draw(st.sampled_from([1, 2, 3, 5]), "blocks per slab")
        layout = SlabLayout(
            data.draw(st.integers(1, 6), "slabs"),
            blocks_per_slab,
            data.draw(st.integers(0, blocks_per_slab - 1), "spare blocks"),
        )
        return dataclasses.replace(limits, total_blocks=layout.blocks, slabs=layout)

    def schedule(self) -> StepPlan:
        self.world.note_times()
        return super().schedule()

    def apply(self, plan: StepPlan, expected: dict[int, tuple], sleepers: set[int]) -> None:
        super().apply(plan, expected, sleepers)
        self.world.follow_evictions()

    def write(self, chunks: tuple[Chunk, ...]) -> None:
        """Obey the message: read what is copied, restore, drop what changes its type, write copies."""
        changes, layout = self.scheduler.cache.changes, self.limits.slabs
        self.scheduler.cache.note_changes_sent()
        self.are_copies_lost = changes.has_copies
        places, size = self.memory._places, self.limits.block_size
        read = {(new, i): places.get((old, i)) for old, new in changes.block_copies for i in range(size)}
        for chunk in chunks:
            self.begin(chunk)
        for slab in changes.retyped_slabs:
            if slab in self.slots:
                self.stale[slab] = self.slots.pop(slab)
            for block in range(slab * layout.blocks_per_slab, (slab + 1) * layout.blocks_per_slab):
                for i in range(size):
                    places.pop((block, i), None)
        places |= read
        super().write(chunks)
        self.stale = {}

    def begin(self, chunk: Chunk) -> None:
        restore = chunk.request.restore
        if restore is None or restore.slot not in self.stale:
            super().begin(chunk)  # else it was called before the slot lost what it held

    def lose_copies(self) -> None:
        """A step that was to copy blocks and failed takes all contents with it."""
        if self.are_copies_lost:
            self.follow_suspend()


def slab_is_emptied(left_out: int | None) -> None:
    """Move a block of a request and a cached one, and check; one of the tables is not told of it, if any."""
    limits = make_limits(slabs=SlabLayout(3, 5), total_blocks=15)
    scheduler = Scheduler(limits, EvictionPolicyName.LRU, b"model")
    cache, tables = scheduler.cache, scheduler.cache.shared_memory.arena.blocks.tables
    scheduler.add(request_of(0, range(3)))
    step(scheduler)
    cache.release(cache.publish([BlockHash(b"cached")], cache.allocate(1), None))
    others = cache.allocate(6)
    cache.release(others[:3])  # two blocks are left in the first slab
    if left_out is not None:
        del tables[left_out]
    taken = [BlockHash(name) for name in (b"first", b"second")]
    for block_hash in taken:
        assert cache.states.reserve(block_hash) is not None
    assert len(cache.changes.block_copies) == 2
    for block_hash in taken:
        cache.states.cancel(block_hash)
    cache.release(others[3:])
    scheduler.check()


def test_every_table_of_blocks_is_told_of_moves():
    """HY-5: the pool, the index, the order of eviction and block tables; one that is left out is found."""
    slab_is_emptied(None)
    for left_out in range(4):
        with pytest.raises((AssertionError, KeyError)):
            slab_is_emptied(left_out)
    with pytest.raises(IndexError):  # no further table
        slab_is_emptied(4)


def test_random_requests_in_slabs():
    lives = settings(max_examples=15, phases=[Phase.generate, Phase.shrink], print_blob=True, **COMMON)
    run_state_machine_as_test(SlabMachine, settings=lives)
