"""HY-2, HY-5, EX-1: owners of slots and the order of eviction; finally random uses of an index against lists."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.prefix_cache.state_index import StateIndex

ALL = [bytes([i]) for i in range(8)]


def make_index(total: int) -> StateIndex:
    return PrefixCache(1, None, total).states


def filled(total: int, block_hashes: bytes, optional: bytes = b"") -> StateIndex:
    """An index with a visible snapshot of each block hash (a byte), taken in this order."""
    index = make_index(total)
    for block_hash in block_hashes:
        index.reserve(bytes([block_hash]), Rank.OPTIONAL if block_hash in optional else Rank.ORDINARY)
        index.commit(bytes([block_hash]))
    return index


def visible(index: StateIndex) -> set[bytes]:
    return {block_hash for block_hash in (bytes([i]) for i in range(256)) if index.find(block_hash) is not None}


class Lives(RuleBasedStateMachine):
    """Visible ones as a list from old to young, the rank of each beside it."""

    @initialize(total=st.integers(0, 4))
    def build(self, total: int) -> None:
        self.index = make_index(total)
        self.total = total
        self.order: list[bytes] = []
        self.ranks: dict[bytes, Rank] = {}
        self.reserved: dict[bytes, Rank] = {}
        self.slots: dict[bytes, int] = {}
        self.evicted = self.replaced = self.skipped = self.taken = 0
        self.opportunistic = {"taken": 0, "consumed": 0, "given_up": 0}

    @rule(block_hash=st.sampled_from(ALL), rank=st.sampled_from(Rank), before=st.sampled_from(ALL))
    def reserve(self, block_hash: bytes, rank: Rank, before: bytes) -> None:
        if block_hash in self.reserved:
            return
        if block_hash in self.order:
            if rank is Rank.OPPORTUNISTIC or self.ranks[block_hash] is not Rank.OPPORTUNISTIC:
                return
            self.forget(block_hash)  # asked for, it is written again
        instead_of = before if rank is Rank.OPTIONAL else None
        if self.ranks.get(instead_of) is Rank.OPTIONAL:
            self.forget(instead_of)
            self.replaced += 1
        if len(self.order) + len(self.reserved) == self.total and not self.make_room(rank):
            assert self.index.reserve(block_hash, rank, instead_of=instead_of) is None
            self.skipped += rank is not Rank.OPPORTUNISTIC
            return
        slot = self.index.reserve(block_hash, rank, instead_of=instead_of)
        assert slot is not None
        assert slot not in self.slots.values()
        self.slots[block_hash] = slot
        self.reserved[block_hash] = rank

    def make_room(self, rank: Rank) -> bool:
        """HY-5, SI-1: no snapshot gives way to opportunistic ones; those go first, then those of decode, by age."""
        if rank is Rank.OPPORTUNISTIC:
            return False
        victims = sorted((one for one in self.order if self.ranks[one] <= rank), key=self.ranks.get)
        if victims:
            self.evicted += self.ranks[victims[0]] is not Rank.OPPORTUNISTIC
            self.forget(victims[0])
        return bool(victims)

    def forget(self, block_hash: bytes) -> None:
        self.order.remove(block_hash)
        self.opportunistic["given_up"] += self.ranks.pop(block_hash) is Rank.OPPORTUNISTIC
        del self.slots[block_hash]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_written=st.booleans())
    def end_writing(self, data: st.DataObject, is_written: bool) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.reserved)))
        rank = self.reserved.pop(block_hash)
        if not is_written:
            self.index.cancel(block_hash)
            del self.slots[block_hash]
            return
        self.index.commit(block_hash)
        self.order.append(block_hash)
        self.ranks[block_hash] = rank
        self.opportunistic["taken"] += rank is Rank.OPPORTUNISTIC
        self.taken += rank is not Rank.OPPORTUNISTIC

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        block_hash = data.draw(st.sampled_from(sorted(self.order)))
        self.index.consume(block_hash)
        self.order.remove(block_hash)
        self.order.append(block_hash)
        self.opportunistic["consumed"] += self.ranks[block_hash] is Rank.OPPORTUNISTIC
        self.ranks[block_hash] = Rank.ORDINARY

    @rule(block_hash=st.sampled_from(ALL))
    def drop(self, block_hash: bytes) -> None:
        self.index.drop(block_hash)
        if block_hash in self.order:
            self.forget(block_hash)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check(self.order)
        assert {block_hash: self.index.find(block_hash) for block_hash in ALL} == {
            block_hash: self.slots[block_hash] if block_hash in self.order else None for block_hash in ALL
        }
        guesses = list(self.ranks.values()).count(Rank.OPPORTUNISTIC)
        assert self.index.used_count == len(self.order) - guesses
        assert self.index.used_provisional_count == guesses
        counts = self.index.taken, self.index.skipped, self.index.evicted, self.index.replaced
        assert counts == (self.taken, self.skipped, self.evicted, self.replaced)
        assert {one: getattr(self.index, f"provisional_{one}") for one in self.opportunistic} == self.opportunistic
        assert self.index.obtainable_count == self.total - len(self.reserved)
        assert self.index.free_count == self.total - len(self.slots)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_provisional_one_takes_a_free_slot_only():
    """SI-1: an opportunistic one does not take the slot of another, which has equal rank."""
    index = make_index(1)
    index.reserve(b"a", Rank.OPPORTUNISTIC)
    assert index.opportunistic_count == 1, "their number is bounded, with those that are being written"
    index.commit(b"a")
    assert index.opportunistic_count == 1
    assert index.reserve(b"b", Rank.OPPORTUNISTIC) is None
    assert visible(index) == {b"a"}
    assert (index.skipped, index.provisional_given_up) == (0, 0)


def test_slots_for_a_step_are_given_out_at_once_in_order():
    """HY-5: the first have the first choice; what is there, or being taken, takes none."""
    index = filled(4, b"ab")
    index.reserve(b"c")
    wanted = [*((name, Rank.ORDINARY) for name in (b"a", b"d", b"c", b"d", b"e")), (b"f", Rank.OPTIONAL)]
    slots = [index.reserve(*one) for one in wanted]
    assert [slot is not None for slot in slots] == [False, True, False, False, True, False]
    assert visible(index) == {b"b"}
    assert (index.evicted, index.skipped) == (1, 1)
    assert index.obtainable_count == 1


def test_the_request_that_took_an_optional_one_does_not_make_it_worth_more():
    """HY-5: only one that resumes from it does."""
    index = filled(2, b"ab", optional=b"b")
    index.touch(b"b")
    index.reserve(b"c")
    assert visible(index) == {b"a"}
