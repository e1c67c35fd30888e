"""A world of ranks in one process, each with memory, a disk and a tier of its own; contents are checked at every use.

What a block or slot holds is the rank and the tokens up to its end. Disks answer in any order, late, wrongly, or never.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

from megatron_ext.engine.cache_audit import CacheAudit
from megatron_ext.engine.result import StepResult
from megatron_ext.parallel.commands import Action, Batch
from megatron_ext.prefix_cache.cache import CachedEntry, PrefixCache
from megatron_ext.prefix_cache.disk.restore import Agreement
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes
from megatron_ext.prefix_cache.disk.tier_storage import TierStorage
from megatron_ext.prefix_cache.disk.warm_restart import EntryMemory
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep
from tests.unit_tests.engine.disk_machine import Content, FakeDisk, FakeMemory
from tests.unit_tests.parallel.led_world import Listener, Model, World

PATIENCE = 10.0  # seconds that a load may take


class RankMemory(FakeMemory):
    """Memory of one rank, which computes steps from their messages alone."""

    def __init__(self, name: int, layout: object, block_size: int, *, has_states: bool) -> None:
        super().__init__(layout)
        self._name, self._size, self._has_states = name, block_size, has_states
        self.running: dict[int, Content] = {}

    def forget(self) -> None:
        self.blocks.clear()
        self.slots.clear()
        self.running.clear()

    def compute(self, step: ScheduledStep) -> None:
        def restore() -> None:
            for chunk in step.chunks:
                if chunk.restore is not None:
                    self.running[chunk.running_slot] = self.slots[chunk.restore.slot]

        self.make_changes(step.changes, restore)
        for chunk in step.chunks:
            content: Content = (self._name,)
            for i, block in enumerate(chunk.block_ids[: -(-chunk.start // self._size)]):
                found = self.blocks[block]
                end = 1 + min((i + 1) * self._size, chunk.start)
                assert found[: len(content)] == content, "a block of another rank or sequence"
                assert len(found) >= end, "a block that is not filled"
                content = found[:end]
            if self._has_states and chunk.start:
                assert self.running[chunk.running_slot] == content, "states of another position"
            content += chunk.token_ids
            for i, block in enumerate(chunk.block_ids):
                if (i + 1) * self._size > chunk.start and min((i + 1) * self._size, chunk.end) > chunk.shared_end:
                    self.write_block(block, [content[: 1 + min((i + 1) * self._size, chunk.end)]])
            self.running[chunk.running_slot] = content
            for snapshot in chunk.snapshots:
                self.write_snapshot(snapshot.slot, BlockHash(b""), [content[: 1 + snapshot.position]])


class ComputingModel(Model):
    """Model of rank 0 that has a memory."""

    memory: RankMemory | None = None  # that of another replica is on other ranks

    def execute(self, step: ScheduledStep) -> StepResult:
        if self.memory is not None:
            self.memory.compute(step)
        return super().execute(step)


class ComputingListener(Listener):
    """Executor of a follower that has a memory."""

    def __init__(self, model: Model, memory: RankMemory) -> None:
        super().__init__(model)
        self._memory = memory

    def execute(self, step: ScheduledStep) -> StepResult:
        self._memory.compute(step)
        return super().execute(step)


class Part:
    """Disk, memory and tier of one rank, in the place of its `WarmRestart`."""

    def __init__(self, world: TieredWorld, name: int, replica: int, memory: RankMemory) -> None:
        self._world, self.name, self.replica, self.memory = world, name, replica, memory
        self.disk = FakeDisk()
        self.tier: DiskTier | None = None
        self.tiers: list[DiskTier] = []

    def go_live(self, caches: Sequence[PrefixCache]) -> list[tuple[DiskTier, EntryMemory]]:
        world, sizes = self._world, EntrySizes((8,), (8,) if caches[0].states is not None else None)
        self.disk.clear()
        tiers: list[tuple[DiskTier, EntryMemory]] = []
        for replica, cache in enumerate(caches, self.replica):
            storage, memory = (self.disk, self.memory) if not tiers else (TierStorage(), EntryMemory())
            exchange = world.exchanges[replica].member(self.name)
            tiers.append((DiskTier(storage, sizes, self._copy, world.clock, PATIENCE, exchange), memory))
            cache.lower_tier = tiers[-1][0]
        self.tier, self.tiers = tiers[0][0], [tier for tier, _ in tiers]
        return tiers

    def _copy(self, entry: CachedEntry, used: float) -> tuple[CachedEntry, list[Content]]:
        found = self.memory.slots.get(entry.slot) if entry.block is None else self.memory.blocks.get(entry.block)
        assert found is not None, "what goes to disk is not there"
        known = self._world.contents.setdefault(entry.block_hash, found[1:])
        assert found == (self.name, *known), "what goes to disk is not what belongs to its hash"
        return entry, [found]

    def keep(self) -> None:
        """Switch all tiers off, as `WarmRestart` does."""
        for tier in self.tiers:
            tier.turn_off()

    weights_changed = keep

    def abandon(self) -> None:
        """Close nothing."""


class Exchange:
    """Reports of the ranks of a replica, which give equally many in the same order."""

    def __init__(self, names: Sequence[int]) -> None:
        self._reports: dict[int, list[list[int]]] = {name: [] for name in names}

    def member(self, name: int) -> Member:
        return Member(self._reports, name)

    def check(self) -> None:
        """Assert that all ranks have reported equally often, once no load is under way."""
        assert len({len(reports) for reports in self._reports.values()}) == 1, "a rank has left out a report"


class Member(Agreement):
    """Agreement of one rank: a report is complete when all ranks have given theirs."""

    def __init__(self, reports: dict[int, list[list[int]]], name: int) -> None:
        self._reports, self._name = reports, name

    def report(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        self._reports[self._name].append(list(numbers))
        place = len(self._reports[self._name]) - 1

        def found() -> list[int] | None:
            if any(len(one) <= place for one in self._reports.values()):
                return None
            return [min(column) for column in zip(*(one[place] for one in self._reports.values()), strict=True)]

        return found


class TieredWorld(World):
    """World whose followers obey commands as soon as they are sent, and take their steps after rank 0."""

    MODEL = ComputingModel

    def __init__(self, limits: object, policy: object, slots: int | None, replicas: int) -> None:
        self.now = 1000.0
        self.contents: dict[BlockHash, Content] = {}
        self.followers = []
        self._steps = 0
        super().__init__(limits, policy, slots, replicas)
        has_states = slots is not None or limits.slabs is not None
        numbers = [0] + [i // 2 for i in range(2 * replicas)]  # rank 0, then two followers of each replica
        memories = [
            RankMemory(name, limits.slabs, limits.block_size, has_states=has_states) for name in range(len(numbers))
        ]
        self.parts = [Part(self, name, number, memories[name]) for name, number in enumerate(numbers)]
        self.exchanges = [
            Exchange(sorted({0} | {name for name, number in enumerate(numbers) if number == replica}))
            for replica in range(replicas)
        ]
        for follower, part in zip(self.followers, self.parts[1:], strict=True):
            follower._disk = part
        self.attach()

    def clock(self) -> float:
        return self.now

    def attach(self) -> None:
        """Attach the disks, as an engine does at its start and after its reset."""
        self.models[0].memory = self.parts[0].memory
        for replica in self.core.replicas:
            replica.audit = CacheAudit(replica.scheduler)
            replica.audit.note_step = lambda *_: self.found_wrong()
        for follower, part in zip(self.followers, self.parts[1:], strict=True):
            follower._executor = ComputingListener(self.models[follower.replica], part.memory)
        self.core.attach_disk(lambda: self.parts[0])

    def found_wrong(self) -> None:
        """Stand for an audit: called in each step, after its commit."""

    def start_anew(self) -> None:
        super().start_anew()
        self.attach()

    def send(self, batch: Batch) -> None:
        data = pickle.dumps(batch)
        for follower in self.followers:
            follower.obey(pickle.loads(data).of(follower.replica))
        if batch.action is Action.STEP:
            self._steps += 1
            for follower in self.followers:
                assert_equal_caches(self.core.replicas[follower.replica].scheduler, follower.scheduler)

    def deliver(self) -> None:
        steps, self._steps = self._steps, 0
        for _ in range(steps):
            for follower in self.followers:
                follower.step()

    def step(self) -> list:
        records = super().step()
        for part in self.parts:
            part.tier.check()
        return records


def assert_equal_caches(one: Scheduler, other: Scheduler) -> None:
    """Assert that two schedulers have the same entries at the same places, in the same order, and the same loads."""
    assert one.disk_loads.numbers() == other.disk_loads.numbers(), "other loads"
    order, others = list(one.cache.by_worth()), list(other.cache.by_worth())
    assert order == others, "other entries, or another order of eviction"
    for block_hash, is_snapshot in order:
        if is_snapshot:
            assert one.cache.states.find(block_hash) == other.cache.states.find(block_hash)
        else:
            assert one.cache.find(block_hash) == other.cache.find(block_hash)
