"""EX-10, SI-2: evictions by `flops`, of blocks and snapshots together, against a model that weighs everything anew.

The model has words for sequences and a letter for a block. It scans all that there is for the least, and finds the
snapshot before another by following the chain of predecessors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.aged_queue import AgedQueue
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.flops import FlopsBlocks, FlopsSnapshots, chance
from megatron_ext.prefix_cache.snapshot_order import Rank

COSTS = EntryCosts(block_size=2, token_flops=3.0, position_flops=0.25, block_bytes=4, state_bytes=7)
FLOPS = EvictionPolicyName.FLOPS
TOTAL = 7
WORDS = st.text("ab", min_size=1, max_size=5)


def prefixes(word: str) -> list[str]:
    return [word[: i + 1] for i in range(len(word))]


def key(prefix: str) -> bytes:
    return prefix.encode()


def operations(start: int, end: int) -> float:
    """Operations of the blocks [start, end), counted token by token."""
    tokens = range(start * COSTS.block_size, end * COSTS.block_size)
    return sum(COSTS.token_flops + COSTS.position_flops * token for token in tokens)


@dataclass(eq=False)
class Taken:
    """Snapshot as the model knows it."""

    prefix: str
    optional: bool
    before: Taken | None
    age: float
    uses: int = 0
    continued: bool = False
    there: bool = True

    def saved(self) -> tuple[int, float]:
        """Blocks of its edge, and operations by chance."""
        before = self.before
        while before is not None and not before.there:
            before = before.before
        start = 0 if before is None else len(before.prefix)
        return len(self.prefix) - start, operations(start, len(self.prefix)) * chance(
            self.uses, is_continued=self.continued
        )


@dataclass
class Owner:
    """A request: its word, the blocks of it that are published, its table."""

    word: str
    published: int
    table: list[int]


@dataclass
class Model:
    """Expected contents of the cache and their ranks."""

    cached: set[str] = field(default_factory=set)
    left_at: dict[str, float] = field(default_factory=dict)  # age of the blocks, of unused prefixes
    ranks: dict[str, float] = field(default_factory=dict)  # of the leaves among them
    taken: dict[str, Taken] = field(default_factory=dict)
    block_age: float = 0.0
    slot_age: float = 0.0

    def before(self, prefix: str) -> Taken | None:
        """The last snapshot before that of `prefix`."""
        return next((self.taken[p] for p in reversed(prefixes(prefix)[:-1]) if p in self.taken), None)

    def leaves(self) -> list[str]:
        return [p for p in self.left_at if not any(q != p and q.startswith(p) for q in self.cached)]

    def line_up(self) -> None:
        """Leaves are weighed when they become some."""
        leaves = self.leaves()
        self.ranks = {p: self.ranks[p] if p in self.ranks else self._block_rank(p) for p in leaves}

    def _block_rank(self, prefix: str) -> float:
        worth = 0.0
        if prefix in self.taken:
            blocks, saved = self.taken[prefix].saved()
            worth = saved / (blocks * COSTS.block_bytes)
        return self.left_at[prefix] + worth

    def slot_rank(self, prefix: str) -> float:
        return self.taken[prefix].age + self.taken[prefix].saved()[1] / COSTS.state_bytes

    def forget(self, prefix: str) -> None:
        self.taken.pop(prefix).there = False
        if prefix in self.ranks:
            self.ranks[prefix] = self._block_rank(prefix)


class Lives(RuleBasedStateMachine):
    """Requests come, resume, publish, leave snapshots and go, in any order."""

    @initialize(slots=st.integers(1, 4))
    def begin(self, slots: int) -> None:
        self.cache = PrefixCache(TOTAL, FLOPS, slots, COSTS)
        self.slots = slots
        self.owners: list[Owner] = []
        self.model = Model()
        self.guesses: list[
            str
        ] = []  # opportunistic ones, the oldest first: the model of the others knows nothing of them

    @rule(word=WORDS)
    def enter(self, word: str) -> None:
        matched = self.cache.match([key(p) for p in prefixes(word)])
        pinned = sum(self.cache.is_evictable(block) for block in matched)
        fresh = len(word) - len(matched)
        if fresh > self.cache.available_count - pinned:
            return
        self.cache.pin(matched)
        for p in prefixes(word)[: len(matched)]:
            self.model.left_at.pop(p, None)
        self.model.line_up()
        self.consume(word[: len(matched)])
        held = {p: self.cache.match([key(q) for q in prefixes(p)])[-1] for p in self.model.left_at}
        free = self.cache.pool.free_count
        blocks = self.cache.allocate(fresh)
        self.evict({p for p, block in held.items() if block in blocks}, max(0, fresh - free))
        self.owners.append(Owner(word, len(matched), [*matched, *blocks]))

    def consume(self, matched: str) -> None:
        """Resume from the last snapshot in the run."""
        known = {*self.model.taken, *self.guesses}
        found = next((p for p in reversed(prefixes(matched)) if p in known), None)
        if found is not None:
            self.cache.states.consume(key(found))
            if found in self.guesses:
                self.guesses.remove(found)
                self.note_taken(found, optional=False)
            taken, model = self.model.taken[found], self.model
            taken.optional, taken.before, taken.age = False, model.before(found), model.slot_age
            taken.uses += 1

    def evict(self, gone: set[str], count: int) -> None:
        assert len(gone) == count
        model = self.model
        for _ in range(count):
            least = min(model.ranks.values())
            first = [p for p, rank in model.ranks.items() if p in gone and math.isclose(rank, least)]
            assert first, f"{gone} went, not the least of {model.ranks}"
            model.block_age = max(model.block_age, least)
            model.cached.discard(first[0])
            del model.left_at[first[0]], model.ranks[first[0]]
            if first[0] in model.taken:
                model.forget(first[0])
            if first[0] in self.guesses:
                self.guesses.remove(first[0])
            model.line_up()

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), rank=st.sampled_from(Rank), takes=st.booleans())
    def publish_next(self, data: st.DataObject, rank: Rank, takes: bool) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        if owner.published < len(owner.word):
            self.publish(owner, rank, takes)

    def publish(self, owner: Owner, rank: Rank, takes: bool) -> None:
        i = owner.published
        prefix = owner.word[: i + 1]
        parent = key(owner.word[:i]) if i else None
        (owner.table[i],) = self.cache.publish([key(prefix)], [owner.table[i]], parent)
        owner.published += 1
        self.model.cached.add(prefix)
        self.model.left_at.pop(prefix, None)
        self.model.line_up()
        if takes and rank is Rank.OPPORTUNISTIC:
            self.guess(prefix)
        elif takes and prefix not in self.model.taken:
            self.take(prefix, optional=rank is Rank.OPTIONAL)

    def guess(self, prefix: str) -> None:
        """SI-1: leave an opportunistic checkpoint, only in a free slot and where there is no snapshot."""
        if prefix in self.guesses or prefix in self.model.taken:
            return
        slot = self.cache.states.reserve(key(prefix), Rank.OPPORTUNISTIC)
        assert (slot is None) == (len(self.model.taken) + len(self.guesses) == self.slots)
        if slot is not None:
            self.cache.states.commit(key(prefix))
            self.guesses.append(prefix)

    def take(self, prefix: str, optional: bool) -> None:
        model, states = self.model, self.cache.states
        if prefix in self.guesses:
            self.guesses.remove(prefix)  # asked for, it is taken again
        elif self.guesses and len(model.taken) + len(self.guesses) == self.slots:
            del self.guesses[0]
        victims = [p for p, one in model.taken.items() if one.optional] or ([] if optional else list(model.taken))
        is_full = len(model.taken) == self.slots
        rank = Rank.OPTIONAL if optional else Rank.ORDINARY
        assert (states.reserve(key(prefix), rank) is None) == (is_full and not victims)
        if is_full and not victims:
            return
        if is_full:
            least = min(map(model.slot_rank, victims))
            gone = [p for p in model.taken if states.find(key(p)) is None]
            assert len(gone) == 1
            assert gone[0] in victims
            assert math.isclose(model.slot_rank(gone[0]), least), f"{gone[0]} gave up its slot, not the least"
            model.slot_age = max(model.slot_age, least)
            model.forget(gone[0])
        states.commit(key(prefix))
        self.note_taken(prefix, optional=optional)

    def note_taken(self, prefix: str, *, optional: bool) -> None:
        model = self.model
        before = model.before(prefix)
        if before is not None:
            before.continued = True
        model.taken[prefix] = Taken(prefix, optional, before, model.slot_age)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.go(data.draw(st.sampled_from(self.owners)))

    def go(self, owner: Owner) -> None:
        self.owners.remove(owner)
        self.cache.release(owner.table)
        used = {p for other in self.owners for p in prefixes(other.word)[: other.published]}
        for prefix in set(prefixes(owner.word)[: owner.published]) - used:
            self.model.left_at[prefix] = self.model.block_age
        self.model.line_up()

    @rule(word=WORDS, at=st.sets(st.integers(1, 5)), rank=st.sampled_from(Rank))
    def serve(self, word: str, at: set[int], rank: Rank) -> None:
        """A whole life at once."""
        count = len(self.owners)
        self.enter(word)
        if len(self.owners) == count:
            return
        owner = self.owners[-1]
        while owner.published < len(word):
            self.publish(owner, rank, owner.published + 1 in at)
        self.go(owner)

    @precondition(lambda self: self.model.taken)
    @rule(data=st.data())
    def lose_a_snapshot(self, data: st.DataObject) -> None:
        """Drop a snapshot, as if it could not be restored."""
        prefix = data.draw(st.sampled_from(sorted(self.model.taken)))
        self.cache.states.drop(key(prefix))
        self.model.forget(prefix)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        assert set(self.cache._index.block_hashes()) == {key(p) for p in self.model.cached}
        assert self.cache.use().blocks_evictable == len(self.model.left_at)
        assert {key(p) for p in [*self.model.taken, *self.guesses]} == set(self.cache.states._visible)
        assert self.cache.use().provisional_slots == len(self.guesses)


QUIET = {"deadline": None, "stateful_step_count": 30, "database": None}
Lives.TestCase.settings = settings(max_examples=120, **QUIET)
TestLives = Lives.TestCase


def evicts_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlopsBlocks, "evict", lambda self, count, limit=math.inf: list(self._ages)[: -count - 1 : -1])


def charges_the_whole_prefix_for_an_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlopsSnapshots, "_before", lambda self, block_hash: None)


def weighs_blocks_by_snapshots_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlopsBlocks, "on_snapshot_removed", lambda self, block_hash: None)


def keeps_stale_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    pop = AgedQueue.pop
    monkeypatch.setattr(AgedQueue, "pop", lambda self, key_now=None: pop(self))


@pytest.mark.parametrize(
    "plant",
    [
        evicts_parents,
        charges_the_whole_prefix_for_an_edge,
        weighs_blocks_by_snapshots_that_are_gone,
        keeps_stale_sizes,
    ],
)
def test_the_machine_finds_a_planted_mistake(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    quick = settings(max_examples=600, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False, **QUIET)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Lives, settings=quick)


def test_operations_are_those_of_every_token():
    """SI-2: a sum over positions."""
    assert COSTS.flops(3, 11) == pytest.approx(sum(3.0 + 0.25 * position for position in range(3, 11)))
    assert COSTS.block_flops(1, 4) == pytest.approx(operations(1, 4))
    assert COSTS.flops(5, 5) == 0
