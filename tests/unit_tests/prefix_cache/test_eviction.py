"""KV-4: contract of every policy, and the additional guarantees of each."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.eviction import EvictionPolicy, LeafFirstLru, RefZero, build_policies


def build_policy(name: EvictionPolicyName) -> EvictionPolicy:
    """A fresh one, for a sequence of the blocks 2, 1, 3."""
    index = BlockIndex()
    index.add([b"a", b"b", b"c"], [2, 1, 3], None)
    return build_policies(name, index, EntryCosts()).blocks


@pytest.mark.parametrize("name", list(EvictionPolicyName))
class TestContract:
    """Contract on which the cache relies."""

    def test_evictable_blocks_are_counted_listed_and_evicted_once(self, name):
        policy = build_policy(name)
        kept = [3, 1, 2]
        policy.hold(kept)
        assert len(policy) == len(kept)
        assert set(policy) == set(kept)
        assert all(block in policy for block in kept)
        assert sorted([*policy.evict(1), *policy.evict(2)]) == sorted(kept)
        assert len(policy) == 0

    def test_reused_blocks_are_not_evicted(self, name):
        policy = build_policy(name)
        policy.hold([3, 1, 2])
        policy.reuse([2, 1])
        assert list(policy) == [3]
        policy.check()
        policy.reuse([3])
        policy.check()
        policy.hold([3])
        assert policy.evict(1) == [3]

    def test_clear(self, name):
        policy = build_policy(name)
        policy.hold([1])
        policy.clear()
        assert len(policy) == 0

    def test_nothing_to_evict_is_a_mistake_of_ours(self, name):
        with pytest.raises((AssertionError, KeyError)):
            build_policy(name).evict(1)


def test_lru_evicts_in_the_order_in_which_they_were_left():
    policy = LeafFirstLru()
    policy.hold([5, 2, 9])
    policy.reuse([5])
    policy.hold([5])
    assert policy.evict(3) == [2, 9, 5]


def test_no_block_is_left_twice():
    policy = LeafFirstLru()
    policy.hold([5, 2])
    with pytest.raises(AssertionError, match="twice"):
        policy.hold([1, 2])


def test_ref_zero_keeps_only_blocks_with_waiting_requests():
    assert LeafFirstLru.keeps_unused
    assert not RefZero.keeps_unused
