"""Agreement of ranks that keep one cache, each its own part of every entry, and return of entries at the start.

Ranks agree on some entries at a time: which of them all ranks have, and then which of them all ranks have read without
a fault. An entry that any rank lacks is absent on all. Places in memory follow from that, so schedulers stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind, NewEntry
from megatron_ext.prefix_cache.hash_chain import BlockHash, packed_tokens
from megatron_ext.prefix_cache.state_index import SlotId

T = TypeVar("T")
WINDOW = 1024  # entries that ranks agree on at a time


class LostRanksError(Exception):
    """Another rank has failed, or does not answer. The message is one line."""


class Agreement:
    """Ranks that keep one cache; each makes the same calls in the same order. This base class serves a single rank.

    Attributes:
        leads: Whether this rank decides for all where one has to.
    """

    leads = True

    def from_leader(self, value: T | None) -> T:
        """Return the value that the leader has given, also on a rank that only plans; other values are ignored.

        Raises:
            LostRanksError: A rank has failed, or does not answer; also the next three.
        """
        assert value is not None, "the leader gives one"
        return value

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Return the least number for each place, also on a rank that only plans; each gives equally many."""
        return list(numbers)

    def report(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Give numbers without waiting; the function returns the least ones, and None until all ranks have given."""
        return lambda: list(numbers)

    def least_written(self, number: int, seconds: float) -> int:
        """Return the least number of the ranks that have a part of the entries.

        Args:
            number: Number of this rank.
            seconds: Time to wait for the others.
        """
        return number


class Place(NamedTuple):
    """Free memory for an entry.

    Attributes:
        entry: The entry.
        block: Place of a block; None for a snapshot.
        slot: Place of a snapshot; None for a block.
    """

    entry: NewEntry
    block: BlockId | None
    slot: SlotId | None


class Restored(NamedTuple):
    """Result of `restore_entries`.

    Attributes:
        placed: Number of entries in memory.
        damaged: Entries that some rank could not read.
    """

    placed: int
    damaged: set[EntryKey]


def agreed_entries(own: Mapping[EntryKey, NewEntry] | None, ranks: Agreement) -> list[NewEntry]:
    """Return the entries that all ranks have, those worth most first, a parent before its children.

    Args:
        own: Entries that this rank has, in this order; None on a rank that only plans.
        ranks: Ranks that keep the cache.
    """
    order = iter(() if own is None else own.values())
    agreed: list[NewEntry] = []
    while window := ranks.from_leader(list(islice(order, WINDOW)) if ranks.leads else None):
        are_held = ranks.least([own is None or entry.key in own for entry in window])
        agreed += [entry for entry, is_held in zip(window, are_held, strict=True) if is_held]
    return agreed


def restore_entries(
    cache: PrefixCache, entries: Iterable[NewEntry], fill: Callable[[Place], bool], ranks: Agreement
) -> Restored:
    """Place entries in free memory, those worth most first; nothing is evicted for them.

    Args:
        cache: Cache that keeps token ids.
        entries: Entries that all ranks have, in the same order.
        fill: Reads an entry into memory; false if its bytes are damaged, and the memory's contents undefined.
        ranks: Ranks that keep the cache.
    """
    order, placed, damaged = iter(entries), list[Place](), set[EntryKey]()
    while held := list(islice(order, WINDOW)):
        if not (cache.pool.free_count or (cache.states is not None and cache.states.free_count)):
            break
        while held:  # again only if damaged ones have left memory for those after them
            places, held = _places(cache, held)
            are_sound = ranks.least([fill(place) for place in places])
            placed += _published(cache, places, are_sound)
            damaged |= {place.entry.key for place, is_sound in zip(places, are_sound, strict=True) if not is_sound}
            if all(are_sound):
                break
    for place in reversed(placed):  # those worth most are the most recently used
        if place.block is not None:
            cache.release([place.block])
        else:
            assert cache.states is not None, "a snapshot was placed"
            cache.states.commit(place.entry.key.block_hash, is_taken=False)
            cache.origins.add_snapshot(place.entry.key.block_hash)
    return Restored(len(placed), damaged)


def _places(cache: PrefixCache, entries: Sequence[NewEntry]) -> tuple[list[Place], list[NewEntry]]:
    """Take free memory for entries whose parents are cached or get a place; return also those without a place."""
    places: list[Place] = []
    others: list[NewEntry] = []
    depths: dict[BlockHash, int] = {}  # of the blocks that have got a place
    for entry in entries:
        key, states = entry.key, cache.states
        if key.kind is EntryKind.BLOCK and cache.pool.free_count and _follows(cache, depths, entry):
            (block,) = cache.allocate(1)
            depths[key.block_hash] = entry.depth
            places.append(Place(entry, block, None))
        elif (
            key.kind is EntryKind.SNAPSHOT
            and states is not None
            and states.free_count
            and _depth(cache, depths, key.block_hash)
        ):
            slot = states.reserve(key.block_hash)
            assert slot is not None, "a slot is free"
            places.append(Place(entry, None, slot))
        else:
            others.append(entry)
    return places, others


def _follows(cache: PrefixCache, depths: dict[BlockHash, int], entry: NewEntry) -> bool:
    """Return whether the block before one, if it has one, is there."""
    return entry.depth == 1 or _depth(cache, depths, entry.parent) == entry.depth - 1


def _depth(cache: PrefixCache, depths: dict[BlockHash, int], block_hash: BlockHash) -> int:
    """Return the depth of a block that is cached or has got a place; 0 if it is neither."""
    return depths.get(block_hash, 0) or (cache.depth_of(block_hash) if cache.find(block_hash) is not None else 0)


def _published(cache: PrefixCache, places: Sequence[Place], are_sound: Sequence[int]) -> list[Place]:
    """Index the blocks that have been read, and give up the places of entries that cannot be used."""
    used: list[Place] = []
    assert cache.cached_token_ids is not None, "entries have their tokens"
    for place, is_sound in zip(places, are_sound, strict=True):
        entry = place.entry
        block_hash = entry.key.block_hash
        if place.block is None:
            assert cache.states is not None, "a slot was reserved"
            is_used = bool(is_sound) and cache.find(block_hash) is not None
            if not is_used:
                cache.states.cancel(block_hash)
        else:
            is_used = bool(is_sound) and _follows(cache, {}, entry)
            if is_used:
                cache.publish([block_hash], [place.block], parent_of(entry))
                cache.origins.add_blocks([block_hash])
                size = len(entry.tokens)
                cache.cached_token_ids.keep_run([block_hash], entry.parent, packed_tokens(entry.tokens), size, size)
            else:
                cache.release([place.block])
        if is_used:
            used.append(place)
    return used


def parent_of(entry: NewEntry) -> BlockHash | None:
    """Return the hash of the block before an entry's; None for the first of a sequence."""
    return None if entry.depth == 1 else entry.parent
