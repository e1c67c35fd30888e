"""Agreement of ranks that keep one cache, each its own part of every entry, and return of entries at the start.

Ranks agree on the entries that all ranks have, and then on the entries that all ranks have read without a fault. An
entry that any rank lacks is absent on all. Places in memory follow from that, so schedulers stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, StoredEntry
from megatron_ext.prefix_cache.hash_chain import BlockHash, packed_tokens
from megatron_ext.prefix_cache.state_index import SlotId

T = TypeVar("T")
WINDOW = 1024  # entries that the leader names at a time


class Agreement:
    """Ranks that keep one cache; each makes the same calls in the same order. This base class serves a single rank.

    Attributes:
        leads: Whether this rank decides for all where one has to.
    """

    leads = True

    def from_leader(self, value: T | None) -> T:
        """Return the value that the leader has given, also on a rank that only plans; other values are ignored."""
        assert value is not None, "the leader gives one"
        return value

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Return the least number for each place, also on a rank that only plans; each gives equally many."""
        return list(numbers)

    def report(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Give numbers without waiting; the function returns the least ones, and None until all ranks have given."""
        return lambda: list(numbers)


class Place(NamedTuple):
    """Free memory for an entry.

    Attributes:
        entry: The entry.
        block: Place of a block; None for a snapshot.
        slot: Place of a snapshot; None for a block.
    """

    entry: StoredEntry
    block: BlockId | None
    slot: SlotId | None


def agreed_entries(own: Mapping[EntryKey, StoredEntry] | None, ranks: Agreement) -> list[StoredEntry]:
    """Return the entries that all ranks have, those worth most first, a parent before its children.

    Args:
        own: Entries that this rank has, in this order; None on a rank that only plans.
        ranks: Ranks that keep the cache.
    """
    order = iter(() if own is None else own.values())
    agreed: list[StoredEntry] = []
    while window := ranks.from_leader(list(islice(order, WINDOW)) if ranks.leads else None):
        are_held = ranks.least([own is None or entry.key in own for entry in window])
        agreed += [entry for entry, is_held in zip(window, are_held, strict=True) if is_held]
    return agreed


def restore_entries(
    cache: PrefixCache,
    entries: Iterable[StoredEntry],
    fill: Callable[[Place], Sequence[int] | None],
    ranks: Agreement,
) -> tuple[int, set[EntryKey]]:
    """Place entries in free memory, those worth most first; nothing is evicted for them.

    Args:
        cache: Cache that keeps token ids.
        entries: Entries that all ranks have, in the same order.
        fill: Reads an entry into memory and returns its token ids; None if it is damaged, and the memory's contents
            undefined.
        ranks: Ranks that keep the cache.

    Returns:
        Number of entries in memory, and the entries that some rank could not read.
    """
    places = _places(cache, entries)
    if not places:
        return 0, set()
    found = [fill(place) for place in places]
    are_sound = ranks.least([tokens is not None for tokens in found])
    tokens = ranks.from_leader(found if ranks.leads else None)
    results = zip(places, are_sound, tokens, strict=True)
    placed = [place for place, is_sound, ids in results if _is_published(cache, place, is_sound, ids)]
    for place in reversed(placed):  # those worth most are the most recently used
        if place.block is not None:
            cache.release([place.block])
        else:
            assert cache.states is not None, "a snapshot was placed"
            cache.states.commit(place.entry.key.block_hash, is_taken=False)
            cache.origins.add_snapshot(place.entry.key.block_hash)
    damaged = {place.entry.key for place, is_sound in zip(places, are_sound, strict=True) if not is_sound}
    return len(placed), damaged


def _places(cache: PrefixCache, entries: Iterable[StoredEntry]) -> list[Place]:
    """Take free memory for entries, blocks after the blocks before them, and snapshots after their blocks."""
    places: list[Place] = []
    depths: dict[BlockHash, int] = {}  # of the blocks that have got a place
    for entry in entries:
        key, states = entry.key, cache.states
        if key.kind is EntryKind.BLOCK:
            follows = entry.depth == 1 or depths.get(entry.parent) == entry.depth - 1
            if follows and cache.pool.free_count:
                (block,) = cache.allocate(1)
                depths[key.block_hash] = entry.depth
                places.append(Place(entry, block, None))
        elif states is not None and states.free_count and key.block_hash in depths:
            slot = states.reserve(key.block_hash)
            assert slot is not None, "a slot is free"
            places.append(Place(entry, None, slot))
    return places


def _is_published(cache: PrefixCache, place: Place, is_sound: int, tokens: Sequence[int] | None) -> bool:
    """Index a block that has been read; return False, and give the place up, if an entry cannot be used."""
    entry, block_hash = place.entry, place.entry.key.block_hash
    if place.block is None:
        assert cache.states is not None, "a slot was reserved"
        if is_sound and cache.find(block_hash) is not None:
            return True
        cache.states.cancel(block_hash)
        return False
    if not is_sound or (entry.depth > 1 and cache.find(entry.parent) is None):
        cache.release([place.block])
        return False
    assert tokens is not None, "the leader has read it, too"
    assert cache.cached_token_ids is not None, "entries have their tokens"
    cache.publish([block_hash], [place.block], parent_of(entry))
    cache.origins.add_blocks([block_hash])
    size = len(tokens)
    cache.cached_token_ids.keep_run([block_hash], entry.parent, packed_tokens(tokens), size, size)
    return True


def parent_of(entry: StoredEntry) -> BlockHash | None:
    """Return the hash of the block before an entry's; None for the first of a sequence."""
    return None if entry.depth == 1 else entry.parent
