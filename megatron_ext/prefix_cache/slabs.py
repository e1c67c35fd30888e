"""Slabs of an arena that KV blocks and snapshots share: the type of each, and the free places in it.

A slab is free, or holds blocks, or holds snapshots. It is free as soon as nothing lies in it, and gets a type when a
place is taken from it. Places are taken from the fullest slab of the type, and from a free slab only if no other slab
of the type has a free place. So few slabs are nearly empty.

Blocks that fill no slab are a slab of their own, which always holds blocks and is never emptied.

A slab is emptied by moving what lies in it to free places of the same type in other slabs (`SlabPlaces.evacuate`), the
only way in which anything moves. Whatever keeps places is in `SlabPlaces.tables` and told at once. The bytes are copied
with the next step; until then the copies are pending, as are those of states that become snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, cast

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.free_places import Place
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.state_index import SlotId


@dataclass(frozen=True)
class StateCopy:
    """Copy of states from a slot apart from the arena to the slot of their snapshot."""

    block_hash: BlockHash
    source: SlotId
    slot: SlotId


@dataclass(frozen=True)
class ArenaChanges:
    """Changes of the arena that precede a step's writes.

    State copies come first, then restores, then the copies of blocks and snapshots: all sources are read before any
    destination is written, since a place may be both. Those of blocks are read even before the state copies, since
    blocks may be moved to make room for these.

    Attributes:
        retyped_slabs: Slabs that changed between blocks and snapshots. Nothing that they held is read any more, except
            by restores, and as the source of a copy.
        state_copies: States that become snapshots.
        block_copies: Pairs (source, destination) of blocks.
        snapshot_copies: Pairs (source, destination) of slots.
    """

    retyped_slabs: tuple[int, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    block_copies: tuple[tuple[BlockId, BlockId], ...] = ()
    snapshot_copies: tuple[tuple[SlotId, SlotId], ...] = ()

    @property
    def has_copies(self) -> bool:
        """True if contents have to be copied, so that a step that fails may lose them."""
        return bool(self.state_copies or self.block_copies or self.snapshot_copies)


NO_CHANGES = ArenaChanges()


class SlabPlaces(Generic[Place]):
    """Places of one type in the slabs of an arena; the free ones, as `FreePlaces`.

    Args:
        arena: All slabs of the arena.
        per_slab: Places in a slab of this type.

    Attributes:
        tables: Functions that are told of every move, each with the new place of each old one: one for every table
            that keeps places of this type.
        copies: Pending copies, destination to source.
        moved_count: Moves since the beginning.
    """

    def __init__(self, arena: Arena, per_slab: int) -> None:
        self._arena = arena
        self.per_slab = per_slab
        self._free: dict[int, list[Place]] = {}  # of every slab of this type
        self._by_room: list[dict[int, None]] = [{} for _ in range(per_slab + 1)]  # slabs by number of free places
        self.typed_count = 0  # free places in slabs of this type
        self._pinned: dict[int, int] = {}  # slab -> places in it that can be neither moved nor evicted
        self.tables: list[Callable[[Mapping[Place, Place]], None]] = []
        self.copies: dict[Place, Place] = {}
        self.moved_count = 0

    @property
    def slab_count(self) -> int:
        """Number of slabs of this type, with one that is not whole."""
        return len(self._free)

    @property
    def unpinned_count(self) -> int:
        """Number of slabs of this type without a pinned place."""
        return len(self._free) - len(self._pinned)

    def __len__(self) -> int:
        return self.typed_count + self.per_slab * self._arena.free_count

    def __iter__(self) -> Iterator[Place]:
        for slab in self._arena.free:
            yield from self.places(slab)
        for free in self._free.values():
            yield from free

    @property
    def pinned_places(self) -> int:
        """Number of pinned places."""
        return sum(self._pinned.values())

    def slabs(self) -> list[int]:
        """Return the slabs of this type."""
        return list(self._free)

    def add_part(self, slab: int, count: int) -> None:
        """Add a slab that has only its first `count` places, and keeps its type."""
        self._free[slab] = self.places(slab)[:count][::-1]
        self._by_room[count][slab] = None
        self.typed_count += count
        self._pinned[slab] = 1

    def places(self, slab: int) -> list[Place]:
        """Return all places in a slab."""
        return cast("list[Place]", list(range(slab * self.per_slab, (slab + 1) * self.per_slab)))

    def _add(self, slab: int) -> None:
        self._free[slab] = self.places(slab)[::-1]
        self._by_room[self.per_slab][slab] = None
        self.typed_count += self.per_slab

    def take(self, count: int) -> list[Place]:
        """Remove and return `count` free places, from the fullest slabs, then from free slabs."""
        taken: list[Place] = []
        room = 1
        while len(taken) < count:
            while room <= self.per_slab and not self._by_room[room]:
                room += 1
            if room > self.per_slab:
                self._add(self._arena.claim(self))
                room = self.per_slab
            slab = next(iter(self._by_room[room]))
            free = self._free[slab]
            first = max(0, room - (count - len(taken)))
            taken += free[first:][::-1]
            del free[first:]
            del self._by_room[room][slab]
            self._by_room[first][slab] = None
            self.typed_count -= room - first
        return taken

    def give(self, places: Sequence[Place]) -> None:
        """Add places, which are free now; slabs with nothing in them are free again."""
        free, per_slab = self._free, self.per_slab
        rooms: dict[int, int] = {}  # of changed slabs, before
        for place in places:
            slab = place // per_slab
            if slab not in rooms:
                rooms[slab] = len(free[slab])
            free[slab].append(place)
        if self.copies:
            for place in places:
                self.copies.pop(place, None)
        self.typed_count += len(places)
        for slab, room in rooms.items():
            del self._by_room[room][slab]
            now = len(free[slab])
            self._by_room[now][slab] = None
            if now == per_slab:
                self._remove(slab)

    def pin(self, place: Place) -> None:
        """Keep the slab of a place that is in use from changing its type."""
        slab = place // self.per_slab
        self._pinned[slab] = self._pinned.get(slab, 0) + 1

    def unpin(self, place: Place) -> None:
        """Undo one `pin`."""
        slab = place // self.per_slab
        self._pinned[slab] -= 1
        if not self._pinned[slab]:
            del self._pinned[slab]

    def emptiest(self) -> int:
        """Return the slab that has the most free places and no pinned one."""
        return next(slab for room in reversed(self._by_room) for slab in room if slab not in self._pinned)

    def evacuate(self) -> None:
        """Free the emptiest slab: move what lies in it to free places in other slabs of this type; tell all tables."""
        slab = self.emptiest()
        free = set(self._free[slab])
        kept = [place for place in self.places(slab) if place not in free]
        assert self.typed_count >= self.per_slab, "no place to move to"
        del self._by_room[len(free)][slab]  # so that nothing is taken from it
        self.typed_count -= len(free)
        moves = dict(zip(kept, self.take(len(kept)), strict=True))
        for old, new in moves.items():
            self.copies[new] = self.copies.pop(old, old)
        self.typed_count += self.per_slab
        self._by_room[self.per_slab][slab] = None
        self._remove(slab)
        self.moved_count += len(moves)
        for tell in self.tables:
            tell(moves)

    def pairs(self) -> tuple[tuple[Place, Place], ...]:
        """Return the pending copies as pairs (source, destination)."""
        return tuple((source, destination) for destination, source in self.copies.items())

    def _remove(self, slab: int) -> None:
        del self._by_room[self.per_slab][slab], self._free[slab]
        self.typed_count -= self.per_slab
        self._arena.release(slab)

    def check(self) -> None:
        """Assert that free places are counted, and lie in their slabs, each once."""
        assert self.typed_count == sum(map(len, self._free.values())), "free places miscounted"
        for slab, free in self._free.items():
            assert set(free) <= set(self.places(slab)), f"slab {slab} has places of others"
            assert len(set(free)) == len(free) < self.per_slab, f"slab {slab} has a place twice, or nothing in it"
            assert slab in self._by_room[len(free)], f"slab {slab} is in the wrong row"
        assert sum(map(len, self._by_room)) == len(self._free), "a slab is in two rows"
        assert self._pinned.keys() <= self._free.keys(), "a slab is pinned that is not of this type"
        free_places = set(self)
        assert free_places.isdisjoint(self.copies), "a copy to a free place is pending"


class Arena:
    """Slabs with their types, and the changes that the next step's message has to tell.

    Args:
        layout: Number and sizes of the slabs.

    Attributes:
        blocks: Places of blocks.
        slots: Places of snapshots.
        retyped_count: Changes of a slab between blocks and snapshots, since the beginning.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.free = list(reversed(range(layout.slabs)))  # the last one is used first
        self.blocks: SlabPlaces[BlockId] = SlabPlaces(self, layout.blocks_per_slab)
        self.slots: SlabPlaces[SlotId] = SlabPlaces(self, layout.snapshots_per_slab)
        if layout.spare_blocks:
            self.blocks.add_part(layout.slabs, layout.spare_blocks)
        self._last: dict[int, object] = {}  # slab -> its places when it had a type last
        self._retyped: dict[int, None] = {}
        self._state_copies: dict[SlotId, StateCopy] = {}  # by destination
        self.retyped_count = 0

    @property
    def free_count(self) -> int:
        """Number of free slabs."""
        return len(self.free)

    def claim(self, places: object) -> int:
        """Return a free slab, which gets the type of `places`, one of the two."""
        assert self.free, "no slab is free"
        slab = self.free.pop()
        if self._last.setdefault(slab, places) is not places:
            self._last[slab] = places
            self._retyped[slab] = None
            self.retyped_count += 1
        return slab

    def release(self, slab: int) -> None:
        """Take back a slab with nothing in it."""
        self.free.append(slab)

    def copy_states(self, copy: StateCopy) -> None:
        """Note that states are to be copied to the slot of their snapshot."""
        self._state_copies[copy.slot] = copy

    def source_of_block(self, block: BlockId) -> BlockId:
        """Return where the contents of a block lie until pending copies are made."""
        return self.blocks.copies.get(block, block)

    def source_of_snapshot(self, block_hash: BlockHash, slot: SlotId) -> SlotId:
        """Return where the states of a visible snapshot lie until pending copies are made."""
        slot = self.slots.copies.get(slot, slot)
        copy = self._state_copies.get(slot)
        return slot if copy is None or copy.block_hash != block_hash else copy.source

    @property
    def changes(self) -> ArenaChanges:
        """Changes that no message has told yet."""
        if not (self._retyped or self._state_copies or self.blocks.copies or self.slots.copies):
            return NO_CHANGES
        return ArenaChanges(
            tuple(self._retyped), tuple(self._state_copies.values()), self.blocks.pairs(), self.slots.pairs()
        )

    def note_changes_sent(self) -> None:
        """Note that a message with all `changes` is on its way."""
        self._retyped.clear()
        self.blocks.copies.clear()
        self.slots.copies.clear()
        self._state_copies.clear()

    def check(self) -> None:
        """Assert that every slab has one type, and that both types' places are in order."""
        slabs = [*self.free, *self.blocks.slabs(), *self.slots.slabs()]
        parts = self.layout.slabs + bool(self.layout.spare_blocks)
        assert sorted(slabs) == list(range(parts)), "a slab was lost, or has two types"
        self.blocks.check()
        self.slots.check()
