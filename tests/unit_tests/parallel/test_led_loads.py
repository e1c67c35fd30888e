"""EX-11, MR-2: random lives of ranks with a disk each: rank 0 decides on loads, and all caches stay equal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine import disk_loading
from megatron_ext.errors import RankError
from megatron_ext.prefix_cache.disk.tier import DiskTier
from megatron_ext.prefix_cache.disk.tier_storage import READ, LoadEstimates
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.disk_loads import DiskLoads
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.request_inputs import RequestInputs
from tests.unit_tests.parallel.tiered_world import TieredWorld

QUICK = (1, 3, 4, 5, 7, 8, 10, 11)  # seeds; loads of both replicas, and each way in which one fails
WHOLE = [seed for seed in range(1020) if seed not in QUICK]
ACTIONS = 40
MAX_ALIVE, MAX_STEPS = 6, 500


class Life:
    """Random life of a world whose disks do what they like; everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        kind = rng.choice(["attention", "hybrid", "arena"])
        layout = SlabLayout(rng.randint(3, 6), rng.randint(1, 3)) if kind == "arena" else None
        max_requests = rng.choice([3, 2, 1])
        limits = SchedulerLimits(
            block_size=rng.choice([2, 3]),
            total_blocks=rng.randint(4, 10) if layout is None else layout.blocks,
            paused_blocks=rng.choice([None, 0, 2]),
            max_requests=max_requests,
            max_tokens=max_requests + rng.randint(4, 12),
            max_sequence_length=24,
            chunked_prefill=True,
            is_durable=True,
            slabs=layout,
        )
        rng.choice([0, 1])  # a draw that keeps the lives of the seeds below
        slots = rng.randint(1, 4) if kind == "hybrid" else None
        self.world = TieredWorld(limits, EvictionPolicyName.LRU, slots, rng.choice([1, 2]))
        self.quickness = rng.choice([0.5, 0.9])  # chance that a read ends in a step
        self.soundness = rng.choice([1.0, 0.95])  # chance that it succeeds
        self.names = 0
        self.prompts: list[tuple[int, ...]] = []

    @property
    def core(self):
        return self.world.core

    def run(self) -> None:
        common = [self.arrive] * 3 + [self.come_back] * 8 + [self.steps] * 6
        rare = [self.abort, self.evict_on_disk, self.fill_queue, self.pass_time, self.quarantine, self.forget]
        rarest = [self.break_disk, self.start_anew]
        for _ in range(ACTIONS):
            self.rng.choice(common * 4 + rare * 3 + rarest)()
        self.drain()

    # Requests

    def arrive(self) -> None:
        self.add([self.rng.randrange(2) for _ in range(self.rng.randint(3, 14))])

    def come_back(self) -> None:
        """Repeat an earlier prompt, which may be on disk by now."""
        if self.prompts:
            self.add([*self.rng.choice(self.prompts), *([self.rng.randrange(2)] * self.rng.choice([0, 0, 1]))])

    def add(self, prompt: list[int]) -> None:
        if len(self.core.output.requests()) >= MAX_ALIVE:
            return self.steps()
        self.prompts.append(tuple(prompt[:18]))
        params = RequestParams(num_tokens_to_generate=self.rng.randint(1, 4), ignore_eos=True)
        self.core.add(self.names, RequestInputs(self.prompts[-1], params), replica_index=self.rng.randrange(2))
        self.names += 1
        return self.steps()

    def abort(self) -> None:
        if alive := list(self.core.output.requests()):
            self.core.output.abort(self.rng.choice(alive))

    # Steps

    def steps(self) -> None:
        for _ in range(self.rng.randint(1, 5)):
            self.step()

    def step(self) -> None:
        for part in self.world.parts:
            for number in sorted(part.disk.loads):
                if self.rng.random() < self.quickness:
                    part.disk.finish(number, is_read=self.rng.random() < self.soundness)
        self.world.step()

    def drain(self) -> None:
        """Without answers of the disks every request ends, since time passes."""
        self.quickness = 0.0
        for _ in range(MAX_STEPS):
            if not self.core.is_busy:
                break
            self.world.now += 1.0
            self.step()
        assert not self.core.is_busy, "requests never end"
        self.step()
        for exchange in self.world.exchanges:
            exchange.check()
        for follower in self.world.followers:
            assert not follower._requests, "a follower keeps who has ended"
            assert follower.scheduler.counters == self.core.replicas[follower.replica].scheduler.counters

    # Disks

    def evict_on_disk(self) -> None:
        disk = self.rng.choice(self.world.parts).disk
        if disk.entries:
            disk.evict(self.rng.choice(sorted(disk.entries)))

    def fill_queue(self) -> None:
        self.rng.choice(self.world.parts).disk.is_full = self.rng.random() < 0.3

    def break_disk(self) -> None:
        """Let a disk fail, or an eviction, as `WarmRestart.on_evicted` notices it."""
        part = self.rng.choice(self.world.parts)
        if self.rng.random() < 0.5:
            part.disk.is_dead = True
            part.disk.entries.clear()
        else:
            part.tier.turn_off()

    def pass_time(self) -> None:
        self.world.now += self.rng.choice([1.0, 11.0])

    # What has to be forgotten

    def forget(self) -> None:
        how = self.rng.choice([self.core.reset_prefix_cache, self.core.suspend, self.core.weights_changed])
        if how == self.core.weights_changed and self.rng.random() < 0.8:
            return
        how()
        if how == self.core.suspend:
            for part in self.world.parts:
                part.memory.forget()
            self.core.resume()
        assert not any(part.disk.entries for part in self.world.parts), "what the cache forgets is still on disk"

    def quarantine(self) -> None:
        """Drop a wrong entry, between steps or when a step has found it."""
        world, scheduler = self.world, self.core.scheduler
        cached = sorted(scheduler.cache.index.block_hashes())
        if not cached:
            return
        wrong = self.rng.choice(cached)

        def drop() -> None:
            del world.found_wrong
            if scheduler.cache.find(wrong) is not None:
                scheduler.quarantine(wrong, states_only=False)

        world.found_wrong = drop
        if self.rng.random() < 0.5:
            drop()
        self.step()

    def start_anew(self) -> None:
        self.world.start_anew()


@pytest.fixture(autouse=True)
def _no_time_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadEstimates, "pays", lambda *_: True)
    monkeypatch.setattr(disk_loading, "IDLE_WAIT", 0.0)


def live(seeds: Sequence[int]) -> Counter[str]:
    """Live often; counts of all loads, and of dropped entries by reason."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        life = Life(seed)
        life.run()
        for i, replica in enumerate(life.core.replicas):
            tier = replica.loading._tier
            counts.update({f"{name} {i}": int(count) for name, count in vars(tier.counts).items()})
        for part in life.world.parts:
            counts.update(part.tier.drops)
    return counts


@pytest.mark.parametrize("seeds", [QUICK, pytest.param(WHOLE, marks=pytest.mark.soak)])
def test_random_lives_of_ranks_with_disks(seeds):
    """EX-11, MR-2: equal caches after each batch of commands, right contents on each rank, and every request ends."""
    counts = live(seeds)
    for name in ("loads_placed 0", "loads_placed 1", "loads_failed 0", "loads_late 0", "incomplete"):
        assert counts[name] > 0, name


def test_a_life_in_which_an_audit_ends_loads():
    """EX-15: other ranks hear of it before the next step."""
    Life(115).run()


# Negative controls


def _ends_are_not_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskLoads, "end", DiskLoads._end)


def _rank_0_places_what_it_has_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def complete(self: DiskTier) -> list[int]:
        return [number for number, one in self.loads.items() if one.own_progress == READ]

    monkeypatch.setattr(DiskTier, "complete", complete)


def _a_tier_that_is_off_forgets_what_is_to_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn_off(self: DiskTier) -> None:
        self.forget_loads()
        plain(self)

    plain = DiskTier.turn_off
    monkeypatch.setattr(DiskTier, "turn_off", turn_off)


@pytest.mark.parametrize(
    ("mistake", "seed"),
    [
        (_ends_are_not_commands, 3),
        (_rank_0_places_what_it_has_read_alone, 1),
        (_a_tier_that_is_off_forgets_what_is_to_be_placed, 74),
    ],
)
def test_the_lives_find(mistake, seed, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises((AssertionError, RankError)):
        Life(seed).run()
