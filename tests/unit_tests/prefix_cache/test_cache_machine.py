"""KV-2 to KV-5: random lives of pool, index and eviction against a model that is written from the rules alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.flops import chance

TOTAL = 7
COSTS = EntryCosts(block_size=3, token_flops=2.0, position_flops=0.5, block_bytes=5)
WORDS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("".join)


@dataclass
class Owner:
    """A request: its whole word, how many of its blocks it has published, its table."""

    word: str
    published: int
    table: list[int]


@dataclass
class Model:
    """Expected cache: prefixes of words, each with the time at which its last owner released it."""

    cached: set[str] = field(default_factory=set)
    left_at: dict[str, int] = field(default_factory=dict)  # of unused prefixes
    hits: dict[str, int] = field(default_factory=dict)  # requests that resumed at their ends, while they were cached
    stood: dict[str, float] = field(default_factory=dict)  # as `left_at`: the age of the cache then
    age: float = 0.0

    def worth(self, prefix: str) -> float:
        """SI-2: operations of the last block alone, over its bytes."""
        size, depth = COSTS.block_size, len(prefix)
        saved = sum(COSTS.token_flops + COSTS.position_flops * t for t in range((depth - 1) * size, depth * size))
        return saved / COSTS.block_bytes * chance(self.hits.get(prefix, 0), is_continued=False)

    def rank(self, prefix: str, policy: EvictionPolicyName) -> float:
        """Rank of a prefix; the lowest is evicted first."""
        return self.left_at[prefix] if policy is EvictionPolicyName.LRU else self.stood[prefix] + self.worth(prefix)


def block_hash(prefix: str) -> bytes:
    return prefix.encode()


class CacheMachine(RuleBasedStateMachine):
    """Requests come, match, compute, publish and leave in any order."""

    @initialize(policy=st.sampled_from(EvictionPolicyName))
    def begin(self, policy):
        self.policy = policy
        self.cache = PrefixCache(TOTAL, policy, costs=COSTS)
        self.owners: list[Owner] = []
        self.model = Model()
        self.clock = 0

    def prefixes(self, word):
        return [word[: i + 1] for i in range(len(word))]

    def used(self):
        return {p for owner in self.owners for p in self.prefixes(owner.word)[: owner.published]}

    @rule(word=WORDS)
    def enter(self, word):
        expected = next((i for i, p in enumerate(self.prefixes(word)) if p not in self.model.cached), len(word))
        matched = self.cache.match([block_hash(p) for p in self.prefixes(word)])
        assert len(matched) == expected
        newly_pinned = sum(self.cache.is_evictable(block) for block in matched)
        assert newly_pinned == sum(p in self.model.left_at for p in self.prefixes(word)[:expected])
        fresh = len(word) - expected
        if fresh > self.cache.available_count - newly_pinned:
            return  # a planner would refuse it
        self.cache.pin(matched)
        for p in self.prefixes(word)[:expected]:
            self.model.left_at.pop(p, None)
        if matched:
            self.cache.count_hit(matched[-1])
            self.model.hits[word[:expected]] = self.model.hits.get(word[:expected], 0) + 1
        free = self.cache.pool.free_count
        held = {p: self.cache.match([block_hash(q) for q in self.prefixes(p)])[-1] for p in self.model.cached}
        blocks = self.cache.allocate(fresh)
        self.evict({p for p, block in held.items() if block in blocks}, max(0, fresh - free))
        self.owners.append(Owner(word, expected, [*matched, *blocks]))

    def evict(self, gone, count):
        """Check evictions one by one: each block was a leaf with the least rank of all leaves at that time."""
        assert len(gone) == count
        model = self.model
        for _ in range(count):
            leaves = [p for p in model.left_at if not any(q != p and q.startswith(p) for q in model.cached)]
            least = min(model.rank(p, self.policy) for p in leaves)
            first = [p for p in leaves if p in gone and math.isclose(model.rank(p, self.policy), least)]
            assert first, f"{gone} went, not the least of {leaves}"
            model.age = max(model.age, least)
            model.cached.discard(first[0])
            model.hits.pop(first[0], None)
            del model.left_at[first[0]]

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), most=st.integers(1, 3))
    def publish_next(self, data, most):
        owner = data.draw(st.sampled_from(self.owners))
        run = slice(owner.published, min(owner.published + most, len(owner.word)))
        prefixes = self.prefixes(owner.word)[run]
        if not prefixes:
            return
        parent = block_hash(owner.word[: run.start]) if run.start else None
        owner.table[run] = self.cache.publish([block_hash(p) for p in prefixes], owner.table[run], parent)
        owner.published = run.stop
        for prefix in prefixes:
            self.model.cached.add(prefix)
            self.model.left_at.pop(prefix, None)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data):
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.cache.release(owner.table)
        self.clock += 1
        for prefix in set(self.prefixes(owner.word)[: owner.published]) - self.used():
            if self.policy is EvictionPolicyName.REF_ZERO:
                self.model.cached.discard(prefix)
                self.model.hits.pop(prefix, None)
            else:
                self.model.left_at[prefix], self.model.stood[prefix] = self.clock, self.model.age

    @rule()
    def reset(self):
        if len(self.owners) > 1:
            return  # rarely enough that caches fill up
        self.cache.reset()
        self.model = Model(age=self.model.age)
        for owner in self.owners:
            self.cache.release(owner.table)
        self.owners = []

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        found = {
            p for p in self.all_prefixes() if len(self.cache.match([block_hash(q) for q in self.prefixes(p)])) == len(p)
        }
        assert found == self.model.cached
        assert self.cache.use().blocks_evictable == len(self.model.left_at)
        for owner in self.owners:  # what a request has published is still its own, and still found
            blocks = self.cache.match([block_hash(p) for p in self.prefixes(owner.word)[: owner.published]])
            assert blocks == owner.table[: owner.published]
        private = [block for owner in self.owners for block in owner.table[owner.published :]]
        assert len(private) == len(set(private)), "a block that is being computed has two owners"

    def all_prefixes(self):
        words = [""]
        for _ in range(4):
            words += [word + letter for word in words for letter in "ab" if len(word + letter) <= 4]
        return {word for word in words if word}


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
