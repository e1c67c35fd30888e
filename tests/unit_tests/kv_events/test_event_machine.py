"""RP-1: routers that read only the bytes of events know the cache's contents, at every step of random runs."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import initialize

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.kv_events import EVENT_BLOCKS
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.kv_events import mirror as mirrors
from megatron_ext.kv_events.changes import Block, Changes, Delta
from megatron_ext.kv_events.events import BlockRemoved
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.prefix_cache.hash_chain import hash_blocks, packed_tokens
from megatron_ext.prefix_cache.public_hash import event_hash, event_salt
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router
from megatron_ext.scheduling.scheduler import Scheduler
from tests.on_request import long_except
from tests.unit_tests.scheduling.builders import add, make_limits, request_of, step
from tests.unit_tests.scheduling.caching_machine import CachingMachine
from tests.unit_tests.scheduling.test_hybrid_machine import COMMON, HybridMachine
from tests.unit_tests.support.kv_events import Reader, encoded
from tests.unit_tests.support.planted import assert_found

SALTS = {None: None, (event_salt("x"),): "x"}


class Told:
    """Machine whose events are taken after every action, or after every few."""

    has_states: bool

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        super().build(data)
        self.every = data.draw(st.sampled_from([1, 1, 3]), "actions between looks")
        self.actions = 0
        self.reader = Reader()
        self.changes = Changes()
        self.mirror = Mirror(self.limits.block_size, has_states=self.has_states)
        self.scheduler.cache.observers = [self.changes]

    def snapshot(self) -> tuple:
        """Snapshot of the cache without its observer: planning must not change the cache."""
        self.scheduler.cache.observers = []
        seen = super().snapshot()
        self.scheduler.cache.observers = [self.changes]
        return seen

    def verify(self) -> None:
        super().verify()
        self.actions += 1
        if self.actions % self.every:
            return
        delta = self.changes.take()
        if delta is not None:
            assert len(delta.stored) <= len(self.scheduler.cache.index)
            assert len(delta.removed) <= len(self.mirror), "more waits than was told"
            self.read(self.reader, self.mirror.apply(delta))
        self.compare(self.reader)
        late = Reader()
        self.read(late, self.mirror.present())
        self.compare(late)

    def read(self, reader: Reader, told: mirrors.CacheEvents) -> None:
        if told.blocks:
            reader.read_blocks(encoded(told.blocks, 3))
        if told.states:
            reader.read(encoded(told.states, 3))

    def compare(self, reader: Reader) -> None:
        cache = self.scheduler.cache
        cached = set(cache.index.block_hashes())
        states = {one for one in cached if cache.states is not None and cache.states.find(one) is not None}
        if self.has_states:
            cached = states | {before for one in states for before in cache.index.ancestors(one)}
        names = {event_hash(block_hash): block_hash for block_hash in cached}
        assert reader.blocks.keys() == names.keys()
        assert reader.states == {event_hash(block_hash) for block_hash in states}
        assert not reader.blocks or reader.ranks == {3}
        for name, block_hash in names.items():
            block = reader.blocks[name]
            assert block.parent is None or block.extra is None, "a salt is told with the first block only"
            root = self.scheduler.root_of(SALTS[block.extra])
            parent = root if block.parent is None else names[block.parent]
            assert hash_blocks(parent, block.tokens, len(block.tokens)) == [block_hash], "tokens or parent of another"


class AttentionEvents(Told, CachingMachine):
    """Machine in which every cached block is published."""

    has_states = False


class HybridEvents(Told, HybridMachine):
    """Runs up to visible snapshots are, and the snapshots."""

    has_states = True


for machine in (AttentionEvents, HybridEvents):
    machine.TestCase.settings = settings(max_examples=7, phases=[Phase.generate, Phase.shrink], **COMMON)
TestAttention = AttentionEvents.TestCase
TestHybrid = HybridEvents.TestCase


def forgets_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, "on_blocks_removed", lambda self, block_hashes: None)


def forgets_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, "on_cleared", lambda self: None)


def forgets_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "event_salt", lambda salt: "another")


def forgets_snapshots_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, "on_snapshot_removed", lambda self, block_hash: None)


def tells_only_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirror, "_shown", lambda self, snapshots: list(snapshots))


@pytest.mark.parametrize(
    ("machine", "plant"),
    long_except(
        {(AttentionEvents, forgets_removals), (HybridEvents, forgets_snapshots_that_go)},
        [
            (AttentionEvents, forgets_removals),
            (AttentionEvents, forgets_resets),
            (AttentionEvents, forgets_salts),
            (HybridEvents, forgets_snapshots_that_go),
            (HybridEvents, tells_only_the_last_block),
        ],
    ),
    ids=lambda value: value.__name__,
)
def test_the_machines_see_planted_mistakes(machine, plant, monkeypatch):
    """RP-1: the comparison can fail."""
    plant(monkeypatch)
    assert_found(machine)


def test_a_salt_is_told_once_in_a_run_of_several_events():
    """RP-1, RP-3: a salted prompt of more blocks than an event has, told in two looks: routers find all of it."""
    size, blocks = 2, EVENT_BLOCKS + 6
    tokens, salt = range(size * blocks), event_salt("x")
    limits = make_limits(block_size=size, total_blocks=200, max_tokens=2 * blocks - 8, max_sequence_length=400)
    scheduler = Scheduler(limits, EvictionPolicyName.LRU, b"model")
    changes, mirror = Changes(), Mirror(size, has_states=False)
    scheduler.cache.observers = [changes]
    router = Router(RoutingConfig("least_computed"))
    router.join("0", size)
    add(scheduler, request_of(0, tokens, num_tokens_to_generate=1, cache_salt="x"))
    told = []
    for _ in range(2):
        step(scheduler)
        told += mirror.apply(changes.take()).blocks
    assert [len(one.hashes) for one in told] == [EVENT_BLOCKS, 2, 4]
    for one in told:
        router.members["0"].stored(one.hashes, one.parent, one.tokens, one.extra_keys)
    assert router.route(Prompt(tokens, salt)).skipped == len(tokens) - 1
    assert [one.extra_keys is None for one in told] == [False, True, True]
    assert told[0].extra_keys[:2] == [[salt], None]


def test_a_cleared_cache_shows_its_blocks_for_new_reasons_only():
    """RP-1: blocks that come again after a reset go with their last snapshot."""
    mirror, blocks = Mirror(2, has_states=True), {b"a" * 32: Block(None, packed_tokens([1, 2]), None)}
    mirror.apply(Delta(stored=blocks, states_stored=dict.fromkeys(blocks)))
    mirror.apply(Delta(cleared=True, stored=blocks, states_stored=dict.fromkeys(blocks)))
    assert len(mirror.contents().blocks) == 1
    told = mirror.apply(Delta(states_removed=dict.fromkeys(blocks)))
    assert [type(one) for one in told.blocks] == [BlockRemoved]
    assert not mirror.contents().blocks
