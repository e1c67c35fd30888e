"""Random lives of a scheduler with a disk tier, checked by contents.

Memory is a table of what each block and slot holds: the tokens up to its end. Whatever is read of it must be right: by
attention, by a restore, by a copy to disk as an entry is evicted. The disk answers in any order, late, wrongly, or
never; pools are tiny. After each action every invariant is asserted, and in the end all requests come to an end though
the disk answers no more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine.disk_loading import DiskLoading
from megatron_ext.prefix_cache.cache import CachedEntry
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes
from megatron_ext.prefix_cache.disk.tier_storage import Loaded, TierLoad
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import ArenaChanges
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.planner import reason_to_refuse
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from megatron_ext.scheduling.step import ScheduledStep

MAX_LENGTH = 24
MAX_ALIVE = 6
PATIENCE = 10.0  # seconds that a load may take
WORDS = st.lists(st.integers(0, 1), min_size=3, max_size=12)
SALTS = st.sampled_from([None, None, None, "x"])

Content = tuple[object, ...]  # salt, then the tokens up to a block's end


class FakeDisk:
    """Entries in a dictionary; loads end when they are told to."""

    def __init__(self) -> None:
        self.entries: dict[EntryKey, Content] = {}
        self.begun: dict[int, TierLoad] = {}
        self.evicted: list[EntryKey] = []
        self.is_full = self.is_dead = False

    @property
    def loads(self) -> dict[int, list[EntryKey]]:
        """Keys of the loads under way, without those given up."""
        wanted = [load for load in self.begun.values() if not load.is_given_up]
        return {load.number: [item.key for item in load.items] for load in wanted}

    @property
    def cancelled(self) -> list[int]:
        return [load.number for load in self.begun.values() if load.is_given_up]

    def write(self, key: EntryKey, size: int, content: Callable[[], tuple[object, Sequence[object]]]) -> bool:
        if self.is_full:
            return False
        self.entries[key] = content()[1][0]
        return True

    def touch(self, used: Mapping[EntryKey, float]) -> Sequence[EntryKey]:
        """Name the entries that are gone and not told of; no entry is evicted in an order here."""
        gone = [key for key in used if key not in self.entries]
        self.evicted = [key for key in self.evicted if key not in gone]
        return gone

    def remove(self, keys: Sequence[EntryKey]) -> None:
        for key in keys:
            self.entries.pop(key, None)

    def drop(self, keys: Sequence[EntryKey]) -> None:
        self.remove(keys)

    def load(self, load: TierLoad) -> None:
        assert load.items, "a load of nothing"
        self.begun[load.number] = load

    def finish(self, number: int, *, is_read: bool) -> None:
        """End a load; one of entries that are gone fails."""
        load, found = self.begun.pop(number), []
        for item in load.items:
            if not is_read or item.key not in self.entries:
                break
            found.append([self.entries[item.key]])
        load.loaded = Loaded(found, 1.0)

    def evict(self, key: EntryKey) -> None:
        del self.entries[key]
        self.evicted.append(key)

    def die(self) -> None:
        """Fail as a directory does that cannot be written any more: all is gone, and no load ends otherwise."""
        self.is_full = self.is_dead = True
        self.entries.clear()
        for load in self.begun.values():
            load.loaded = Loaded((), 0.0)
        self.begun.clear()

    def gone(self) -> Sequence[EntryKey] | None:
        taken, self.evicted = self.evicted, []
        return None if self.is_dead else taken

    def wait(self, loads: object, seconds: float) -> None:
        """Waiting brings nothing: a rule ends loads."""

    def clear(self) -> None:
        self.entries.clear()
        self.evicted.clear()


class FakeMemory:
    """Contents of blocks and slots; in an arena a write to one destroys the other that lies there."""

    def __init__(self, layout: SlabLayout | None) -> None:
        self.layout = layout
        self.blocks: dict[int, Content] = {}
        self.slots: dict[int, Content] = {}

    def write_block(self, block: int, buffers: Sequence[Content]) -> None:
        if self.layout is not None:
            self.slots.pop(block // self.layout.blocks_per_slab, None)
        self.blocks[block] = buffers[0]

    def write_snapshot(self, slot: int, block_hash: BlockHash, buffers: Sequence[Content]) -> None:
        if self.layout is not None and slot < self.layout.slabs:
            size = self.layout.blocks_per_slab
            self.blocks = {block: one for block, one in self.blocks.items() if block // size != slot}
        self.slots[slot] = buffers[0]

    def make_changes(self, changes: ArenaChanges, restore: Callable[[], None] = lambda: None) -> None:
        for copy in changes.state_copies:
            self.slots[copy.slot] = self.slots[copy.source]
        restore()
        for new, one in [(new, self.blocks.get(old)) for old, new in changes.block_copies]:
            self.write_block(new, [one])


class DiskMachine(RuleBasedStateMachine):
    """Adds, steps, fails, aborts, resets and quarantines at random, beside a disk that does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.alive: list[Request] = []
        self.ended: list[Request] = []
        self.contents: dict[BlockHash, Content] = {}  # that belong to a block hash
        self.running: dict[int, Content] = {}  # running state slot -> tokens
        self.arrivals = 0

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(["attention", "hybrid", "arena"]), "kind")
        per_slab = data.draw(st.sampled_from([1, 2, 3]), "blocks per slab")
        layout = None
        if kind == "arena":
            spare = data.draw(st.integers(0, per_slab - 1), "spare")
            layout = SlabLayout(data.draw(st.integers(2, 6), "slabs"), per_slab, spare)
        max_requests = data.draw(st.sampled_from([3, 2, 1]), "max_requests")
        self.limits = SchedulerLimits(
            block_size=data.draw(st.sampled_from([2, 1, 3]), "block_size"),
            total_blocks=data.draw(st.integers(2, 12), "blocks") if layout is None else layout.blocks,
            paused_blocks=data.draw(st.sampled_from([None, 0, 2]), "paused_blocks"),
            max_requests=max_requests,
            max_tokens=max_requests + data.draw(st.integers(2, 8), "spare tokens"),
            max_sequence_length=MAX_LENGTH,
            chunked_prefill=True,
            opportunistic=OpportunisticRules(data.draw(st.sampled_from([0, None]), "opportunistic"), spacing=1),
            is_durable=True,
            slabs=layout,
        )
        self.rng = random.Random(data.draw(st.integers(0, 2**16), "disk"))
        self.quickness = data.draw(st.sampled_from([0.4, 1.0, 0.0]), "quickness")  # chance that a load ends in a step
        slots = data.draw(st.integers(1, 4), "slots") if kind == "hybrid" else None
        self.has_states = kind != "attention"
        self.scheduler = Scheduler(self.limits, EvictionPolicyName.LRU, b"model", slots)
        self.memory, self.disk = FakeMemory(layout), FakeDisk()
        sizes = EntrySizes((8,), (8,) if self.has_states else None)
        self.tier = DiskTier(self.disk, sizes, self.copy, lambda: self.now, PATIENCE)
        self.scheduler.cache.lower_tier = self.tier
        self.loading = DiskLoading(self.scheduler, self.tier, self.memory)

    def copy(self, entry: CachedEntry, used: float) -> tuple[object, list[Content]]:
        """Check entries as they are evicted: each must be there and right."""
        found = self.memory.slots.get(entry.slot) if entry.block is None else self.memory.blocks.get(entry.block)
        assert found == self.contents[entry.block_hash], "what goes to disk is not what belongs to its hash"
        return entry, [found]

    # Requests

    @precondition(lambda self: len(self.alive) < MAX_ALIVE)
    @rule(tokens=WORDS, to_generate=st.integers(1, 6), salt=SALTS)
    def arrive(self, tokens: list[int], to_generate: int, salt: str | None) -> None:
        self.add(tokens, to_generate, salt)

    @precondition(lambda self: self.ended and len(self.alive) < MAX_ALIVE)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def come_back(self, data: st.DataObject, more: list[int]) -> None:
        """Add a prompt that continues an earlier request, or repeats it."""
        earlier = data.draw(st.sampled_from(self.ended), "earlier")
        self.add([*earlier.tokens, *more], 2, earlier.params.cache_salt)

    def add(self, tokens: Sequence[int], to_generate: int, salt: str | None) -> None:
        params = RequestParams(num_tokens_to_generate=to_generate, cache_salt=salt)
        name = self.arrivals
        request = Request(name, RequestInputs(tuple(tokens), params), arrival=name, seed=0)
        if reason_to_refuse(request, self.limits) is None:
            self.arrivals += 1
            self.alive.append(request)
            self.scheduler.add(request)
        self.verify()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.alive), "aborted")
        self.scheduler.end(request, Outcome(Status.ABORTED))
        self.verify()

    # Steps

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 5), decides=st.sampled_from([True, True, False]))
    def steps(self, count: int, decides: bool) -> None:
        for _ in range(count):
            self.step(decides=decides)

    @precondition(lambda self: self.ended and len(self.alive) < MAX_ALIVE)
    @rule(data=st.data(), count=st.integers(1, 12))
    def serve_again(self, data: st.DataObject, count: int) -> None:
        """Repeat earlier prompts, beside what is alive."""
        for earlier in data.draw(st.lists(st.sampled_from(self.ended), min_size=1, max_size=3), "earlier"):
            self.add(earlier.prompt_tokens, 1, earlier.params.cache_salt)
        for _ in range(count):
            if self.alive:
                self.step()

    def step(self, *, decides: bool = True, fails: bool = False) -> None:
        """One step of a replica; in a step that was launched ahead nothing is decided."""
        for number in self.rng.sample(sorted(self.disk.loads), len(self.disk.loads)):
            if self.rng.random() < self.quickness:
                self.disk.finish(number, is_read=self.rng.random() < 0.95)
        self.loading.follow()
        if decides:
            self.loading.decide()
            self.verify()
            self.verify_runs()
        plan = self.scheduler.schedule()
        self.learn(plan)
        waiting = [one.load for one in plan.deferrals if one.resource == "disk"]
        assert all(number in self.tier.loads for number in waiting), "a request waits for a load that is over"
        if not plan.chunks:
            held = all(map(self.scheduler.waits_for_disk, self.scheduler.queues.waiting))
            assert held, "requests are alive, wait for nothing, and none can run"
        else:
            step = self.scheduler.describe(plan)
            self.execute(step, {chunk.request.request_id: chunk.request for chunk in plan.chunks}, is_lost=fails)
            if fails:
                self.scheduler.abandon(plan.chunks, "planted")
            else:
                tokens = {one.request_id: self.next_token(plan, one.request_id) for one in step.chunks if one.sampling}
                self.scheduler.commit(step, tokens)
        self.verify()

    def next_token(self, plan: StepPlan, request_id: int) -> int:
        tokens = next(one.request.tokens for one in plan.chunks if one.request.request_id == request_id)
        return (len(tokens) // 3 + sum(tokens[-3:])) % 2

    def learn(self, plan: StepPlan) -> None:
        """Note the contents of block hashes."""
        size = self.limits.block_size
        for request in [*self.alive, *self.scheduler.queues]:
            for i, block_hash in enumerate(request.block_hashes):
                content = (request.params.cache_salt, *request.tokens[: (i + 1) * size])
                assert self.contents.setdefault(block_hash, content) == content

    def execute(self, step: ScheduledStep, requests: dict[int, Request], *, is_lost: bool) -> None:
        """Obey a message; every read must find what belongs there."""
        size, memory = self.limits.block_size, self.memory

        def restore() -> None:
            for chunk in step.chunks:
                if chunk.restore is not None:
                    self.running[chunk.running_slot] = memory.slots[chunk.restore.slot]

        memory.make_changes(step.changes, restore)
        writes: list[tuple[int, Content]] = []
        for chunk in step.chunks:
            request = requests[chunk.request_id]
            content = (request.params.cache_salt, *request.tokens)
            for i, block in enumerate(chunk.block_ids):
                end = min((i + 1) * size, chunk.end)
                if end <= max(chunk.start, chunk.shared_end) and (i + 1) * size <= chunk.end:
                    assert memory.blocks.get(block) == content[: end + 1], "attention reads what is of others"
                elif end > chunk.shared_end:
                    memory.write_block(block, [content[: end + 1] if not is_lost else ("lost",)])
            if self.has_states:
                before = self.running.get(chunk.running_slot) if chunk.start else content[:1]
                assert before == content[: chunk.start + 1], "states of another position"
                self.running[chunk.running_slot] = content[: chunk.end + 1]
                writes += [(one.slot, content[: one.position + 1]) for one in chunk.snapshots]
        for slot, states in writes:
            memory.write_snapshot(slot, BlockHash(b""), [("lost",) if is_lost else states])

    @precondition(lambda self: self.alive)
    @rule()
    def fail(self) -> None:
        self.step(fails=True)

    @precondition(lambda self: self.disk.entries)
    @rule(action=st.sampled_from(["suspend", "weights_changed", "reset_prefix_cache"]))
    def forget(self, action: str) -> None:
        if action == "weights_changed":
            self.scheduler.weights_changed(restarts=True)
        else:
            getattr(self.scheduler, action)()
        if action == "suspend":
            self.memory.blocks.clear()
            self.memory.slots.clear()
        assert not self.disk.entries, "what the cache forgets is still on disk"
        self.verify()

    @precondition(lambda self: self.contents)
    @rule(data=st.data(), states_only=st.booleans())
    def quarantine(self, data: st.DataObject, states_only: bool) -> None:
        """Drop an entry, and all that continues it, in both tiers."""
        wrong = data.draw(st.sampled_from(sorted(self.contents)), "wrong")
        if self.scheduler.cache.find(wrong) is None:
            return
        states_only = states_only and self.has_states
        self.scheduler.quarantine(wrong, states_only=states_only)
        start = self.contents[wrong]
        for key in self.disk.entries:
            content = self.contents[key.block_hash]
            is_itself = states_only and key == EntryKey(EntryKind.BLOCK, wrong)
            assert is_itself or content[: len(start)] != start, "what came from a wrong entry is still on disk"
        self.verify()

    # Disk

    @precondition(lambda self: self.disk.loads)
    @rule(data=st.data(), is_read=st.sampled_from([True, True, True, False]))
    def finish_load(self, data: st.DataObject, is_read: bool) -> None:
        self.disk.finish(data.draw(st.sampled_from(sorted(self.disk.loads)), "load"), is_read=is_read)

    @precondition(lambda self: self.disk.entries)
    @rule(data=st.data())
    def evict_on_disk(self, data: st.DataObject) -> None:
        self.disk.evict(data.draw(st.sampled_from(sorted(self.disk.entries)), "entry"))

    @precondition(lambda self: self.disk.entries)
    @rule(is_full=st.sampled_from([False, False, True]))
    def fill_queue(self, is_full: bool) -> None:
        self.disk.is_full = is_full

    @precondition(lambda self: self.disk.entries)
    @rule(dies=st.sampled_from([False, False, False, False, False, True]))
    def fail_storage(self, dies: bool) -> None:
        if dies:
            self.disk.die()

    @precondition(lambda self: self.disk.loads)
    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    # Checks

    def verify(self) -> None:
        self.ended += [request for request in self.alive if request.is_ended]
        self.alive = [request for request in self.alive if not request.is_ended]
        self.scheduler.check()
        self.tier.check()
        assert len(self.scheduler.disk_loads) == len(self.tier.loads), "tier and scheduler know other loads"
        assert self.disk.loads.keys() <= self.tier.loads.keys(), "a load goes on that is not wanted"

    def verify_runs(self) -> None:
        """Each request that may be admitted knows how far memory and disk together go."""
        for request in self.scheduler.queues.waiting.line() if self.has_states else ():
            hashes = request.block_hashes
            end = matched = len(self.scheduler.cache.match(hashes))
            while end < len(hashes) and EntryKey(EntryKind.BLOCK, hashes[end]) in self.tier:
                end += 1
            assert end <= request.snapshot_plan.cached_end(matched) <= len(hashes), "no snapshot where it diverges"

    def teardown(self) -> None:
        """Without answers of the disk every request ends, since time passes."""
        if not hasattr(self, "limits"):
            return
        self.quickness = 0.0
        for _ in range(40 * MAX_LENGTH):
            if not self.alive:
                break
            self.now += 1.0
            self.step()
        assert not self.alive, "requests never end"
        assert self.scheduler.cache.available_count == self.limits.total_blocks, "places were lost"
