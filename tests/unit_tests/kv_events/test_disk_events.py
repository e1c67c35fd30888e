"""RP-1: events of entries on disk, apart from those in memory by their medium."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.kv_events.changes import Changes
from megatron_ext.kv_events.events import DISK, MEMORY, StateStored
from megatron_ext.kv_events.mirror import CacheEvents, Mirror
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.prefix_cache.disk.announcing import DiskAnnouncer
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry
from megatron_ext.prefix_cache.hash_chain import hash_blocks, packed_tokens
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.prefix_cache.public_hash import event_hash, event_salt
from tests.unit_tests.kv_events import vllm_classes as vllm
from tests.unit_tests.support.kv_events import asker_of, encoded, replayed, until

HOST = "tcp://127.0.0.1:0"
SIZE, ROOT = 4, b"r" * 32
TOKENS = packed_tokens(range(5 * SIZE))
CHAIN = hash_blocks(ROOT, TOKENS, SIZE)
Index = dict[str, set[int]]


def run(first: int, last: int) -> PublishedRun:
    """Blocks [first, last) of the chain."""
    return PublishedRun(CHAIN[first:last], CHAIN[first - 1] if first else None, TOKENS, SIZE, last * SIZE)


def entry(block: int, kind: EntryKind = EntryKind.BLOCK, root: bytes = ROOT) -> NewEntry:
    """A block or snapshot of the chain."""
    parent, tokens = (CHAIN[block - 1] if block else root), TOKENS[block * SIZE : (block + 1) * SIZE]
    return NewEntry(EntryKey(kind, CHAIN[block]), parent, block + 1, tokens)


def read(index: Index, told: CacheEvents) -> None:
    """Apply the events of blocks as a client with vLLM's classes does, which keeps media apart."""
    if not told.blocks:
        return
    for event in vllm.decode(encoded(told.blocks)).events:
        if isinstance(event, vllm.AllBlocksCleared):
            index.clear()
        elif isinstance(event, vllm.BlockStored):
            assert len(event.token_ids) == SIZE * len(event.block_hashes)
            assert index.setdefault(event.medium, set()).isdisjoint(event.block_hashes), "told twice"
            index[event.medium] |= set(event.block_hashes)
        else:
            assert index[event.medium] >= set(event.block_hashes), "removed, and not there"
            index[event.medium] -= set(event.block_hashes)


def names(blocks: Iterable[int]) -> set[int]:
    return {event_hash(CHAIN[block]) for block in blocks}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 4])
def test_random_lives_of_both_media(seed: int, every: int):
    """A client knows the contents of memory and disk after each look, and so does one that comes late."""
    rng, changes, index = random.Random(seed), Changes(), Index()
    announcer, mirror = DiskAnnouncer(changes.disk, ROOT), Mirror(SIZE, has_states=False)
    memory, disk = 0, set[int]()  # memory has the first blocks of the chain; on disk any may be missing
    for number in range(200):
        action = rng.randrange(5)
        block = rng.randrange(len(CHAIN))
        if action == 0 and memory < len(CHAIN):
            changes.on_blocks_stored(run(0, memory := memory + 1))
        elif action == 1 and memory:
            memory -= 1
            changes.on_blocks_removed([CHAIN[memory]])
        elif action == 2:
            announcer.on_stored(entry(block))
            disk.add(block)
        elif action == 3:
            announcer.on_removed([EntryKey(EntryKind.BLOCK, CHAIN[block])])
            disk.discard(block)
        elif rng.random() < 0.2:
            changes.on_cleared()
            memory = 0
        if number % every:
            continue
        delta = changes.take()
        if delta is not None:
            read(index, mirror.apply(delta))
        late = Index()
        read(late, mirror.present())
        for known in (index, late):
            assert known.get(MEMORY, set()) == names(range(memory))
            assert known.get(DISK, set()) == names(disk)


def test_snapshots_on_disk_have_the_medium_too():
    """Also those whose block is not on disk; in memory a hybrid's blocks after the last snapshot are not published."""
    changes, mirror = Changes(), Mirror(SIZE, has_states=True)
    announcer = DiskAnnouncer(changes.disk, ROOT)
    changes.on_blocks_stored(run(0, 3))
    changes.on_snapshot_stored(CHAIN[1])
    announcer.on_stored(entry(3, EntryKind.SNAPSHOT))
    announcer.on_stored(entry(2))
    told = mirror.apply(changes.take())
    first, second = told.blocks
    assert (first.medium, set(first.hashes)) == (MEMORY, names([0, 1]))
    assert (second.medium, set(second.hashes), second.parent) == (DISK, names([2]), event_hash(CHAIN[1]))
    assert told.states == [
        StateStored([event_hash(CHAIN[1])], MEMORY),
        StateStored([event_hash(CHAIN[3])], DISK),
    ]


@pytest.mark.parametrize(("root", "is_salted"), [(ROOT, False), (b"s" * 32, True)])
def test_salts(root: bytes, is_salted: bool):
    """The salt of a sequence on disk is not known: its first block has one that no client has."""
    changes = Changes()
    announcer = DiskAnnouncer(changes.disk, ROOT)
    for block in (0, 1):
        announcer.on_stored(entry(block, root=root))
    (event,) = Mirror(SIZE, has_states=False).apply(changes.take()).blocks
    assert (event.extra_keys is not None) == is_salted
    if is_salted:
        assert event.extra_keys[1] is None
        assert event.extra_keys[0] != [event_salt(root.hex())]


def test_the_last_changes_are_published_at_the_end():
    """Entries that the end of a process writes to disk reach subscribers and clients that ask for replays before it."""
    publisher = Publisher(KvEventsConfig(HOST, "kv-events", HOST, 10))
    publisher.start(Mirror(SIZE, has_states=False))
    asker = asker_of(publisher.blocks.replay_endpoint)
    until(lambda: bool(replayed(asker, 0)))
    published = []
    publisher.blocks.publish = lambda events: published.extend(events)
    publisher.changes._wake = lambda: None  # the thread is not awake before the end
    DiskAnnouncer(publisher.changes.disk, ROOT).on_stored(entry(0))
    publisher.close()
    assert [(event.medium, set(event.hashes)) for event in published] == [(DISK, names([0]))]
