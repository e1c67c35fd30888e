"""Slabs of an arena that KV blocks and snapshots share: what each holds, and the free blocks in it.

A slab is free, or holds blocks, or a snapshot. It is free as soon as nothing lies in it. Blocks are taken from the
fullest slab of blocks, and from a free slab only if no other has a free one. So few slabs are nearly empty.

Blocks that fill no slab are a slab of their own, which always holds blocks and is never emptied.

A slab of blocks is emptied by moving them to free places in other ones (`SlabBlocks.evacuate`), the only way in which
anything moves. Whatever keeps the places of blocks is in `SlabBlocks.tables` and told at once. The bytes are copied
with the next step; until then the copies are pending, as are the copies of states that become snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.block_pool import BlockId
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

    State copies come first, then restores, then the copies of blocks, which are read before all others, since blocks
    may be moved to make room for them.

    Attributes:
        retyped_slabs: Slabs that changed between blocks and a snapshot. Nothing that they held is read any more, except
            by restores, and as the source of a copy.
        state_copies: States that become snapshots.
        block_copies: Pairs (source, destination) of blocks.
    """

    retyped_slabs: tuple[int, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    block_copies: tuple[tuple[BlockId, BlockId], ...] = ()

    @property
    def has_copies(self) -> bool:
        """True if contents have to be copied, so that a step that fails may lose them."""
        return bool(self.state_copies or self.block_copies)


NO_CHANGES = ArenaChanges()


class SlabBlocks:
    """Blocks in the slabs of an arena that hold blocks; `FreePlaces` of free blocks, those in free slabs included.

    Args:
        arena: All slabs of the arena.

    Attributes:
        per_slab: Blocks in a slab.
        tables: Functions that are told of every move, each with the new place of each old one: one for every table
            that keeps places of blocks.
        typed_count: Free places in slabs of blocks.
        copies: Pending copies, destination to source.
        moved_count: Moves since the beginning.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.per_slab = per_slab = arena.layout.blocks_per_slab
        self.tables: list[Callable[[Mapping[BlockId, BlockId]], None]] = []
        self._free: dict[int, list[BlockId]] = {}  # of every slab of blocks
        self._by_room: list[dict[int, None]] = [{} for _ in range(per_slab + 1)]  # slabs by number of free places
        self.typed_count = 0
        self.copies: dict[BlockId, BlockId] = {}
        self.moved_count = 0
        if arena.layout.spare_blocks:
            self._add(arena.layout.slabs, arena.layout.spare_blocks)

    @property
    def slabs(self) -> list[int]:
        """Whole slabs of blocks."""
        return [slab for slab in self._free if slab < self._arena.layout.slabs]

    @property
    def slab_count(self) -> int:
        """Number of whole slabs of blocks."""
        return len(self._free) - bool(self._arena.layout.spare_blocks)

    def __len__(self) -> int:
        return self.typed_count + self.per_slab * len(self._arena)

    def __iter__(self) -> Iterator[BlockId]:
        for slab in self._arena:
            yield from self.places(slab)
        for free in self._free.values():
            yield from free

    def places(self, slab: int) -> list[BlockId]:
        """Return all places in a slab."""
        return list(map(BlockId, range(slab * self.per_slab, (slab + 1) * self.per_slab)))

    def _add(self, slab: int, count: int) -> None:
        self._free[slab] = self.places(slab)[:count][::-1]
        self._by_room[count][slab] = None
        self.typed_count += count

    def take(self, count: int) -> list[BlockId]:
        """Remove and return `count` free places, from the fullest slabs, then from free slabs."""
        taken: list[BlockId] = []
        room = 1
        while len(taken) < count:
            while room <= self.per_slab and not self._by_room[room]:
                room += 1
            if room > self.per_slab:
                self._add(self._arena.claim(for_blocks=True), self.per_slab)
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

    def give(self, places: Sequence[BlockId]) -> None:
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

    def evacuate(self) -> None:
        """Free the emptiest slab: move what lies in it to free places in other slabs; tell all tables."""
        whole = self._arena.layout.slabs
        slab = next(slab for room in reversed(self._by_room) for slab in room if slab < whole)
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

    def _remove(self, slab: int) -> None:
        del self._by_room[self.per_slab][slab], self._free[slab]
        self.typed_count -= self.per_slab
        self._arena.give([SlotId(slab)])

    def check(self) -> None:
        """Assert that free places are counted, and lie in their slabs, each once."""
        assert self.typed_count == sum(map(len, self._free.values())), "free places miscounted"
        for slab, free in self._free.items():
            assert set(free) <= set(self.places(slab)), f"slab {slab} has places of others"
            assert len(set(free)) == len(free) < self.per_slab, f"slab {slab} has a place twice, or nothing in it"
            assert slab in self._by_room[len(free)], f"slab {slab} is in the wrong row"
        assert sum(map(len, self._by_room)) == len(self._free), "a slab is in two rows"
        assert set(self).isdisjoint(self.copies), "a copy to a free place is pending"


class Arena:
    """Slabs, their contents, and pending changes for the message of the next step.

    A free slab is a free slot for a snapshot (see `FreePlaces`).

    Args:
        layout: Number and sizes of the slabs.

    Attributes:
        blocks: Places of blocks.
        state_copies: Pending copies of states that become snapshots, by slot.
        retyped_count: Changes of a slab between blocks and a snapshot, since the beginning.
    """

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self._free = [SlotId(slab) for slab in reversed(range(layout.slabs))]  # the last one is used first
        self.blocks = SlabBlocks(self)
        self._held_blocks: dict[int, bool] = {}  # what each slab held last
        self._retyped: dict[int, None] = {}
        self.state_copies: dict[SlotId, StateCopy] = {}
        self.retyped_count = 0

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[SlotId]:
        return iter(self._free)

    @property
    def snapshot_count(self) -> int:
        """Number of slabs that hold a snapshot, or are reserved for one."""
        return self.layout.slabs - len(self._free) - self.blocks.slab_count

    def take(self, count: int) -> list[SlotId]:
        """Remove and return `count` free slots."""
        return [self.claim(for_blocks=False) for _ in range(count)]

    def claim(self, *, for_blocks: bool) -> SlotId:
        """Remove and return a free slab, which holds blocks or a snapshot from now on."""
        assert self._free, "no slab is free"
        slab = self._free.pop()
        if self._held_blocks.setdefault(slab, for_blocks) is not for_blocks:
            self._held_blocks[slab] = for_blocks
            self._retyped[slab] = None
            self.retyped_count += 1
        return slab

    def give(self, slots: Sequence[SlotId]) -> None:
        """Take back slabs with nothing in them."""
        self._free += slots

    def source_of_block(self, block: BlockId) -> BlockId:
        """Return where the contents of a block lie until pending copies are made."""
        return self.blocks.copies.get(block, block)

    def source_of_snapshot(self, block_hash: BlockHash, slot: SlotId) -> SlotId:
        """Return where the states of a visible snapshot lie until pending copies are made."""
        copy = self.state_copies.get(slot)
        return slot if copy is None or copy.block_hash != block_hash else copy.source

    @property
    def changes(self) -> ArenaChanges:
        """Changes that no message has told yet."""
        copies = self.blocks.copies
        if not (self._retyped or self.state_copies or copies):
            return NO_CHANGES
        pairs = tuple((source, destination) for destination, source in copies.items())
        return ArenaChanges(tuple(self._retyped), tuple(self.state_copies.values()), pairs)

    def note_changes_sent(self) -> None:
        """Note that a message with all `changes` is on its way."""
        self._retyped.clear()
        self.blocks.copies.clear()
        self.state_copies.clear()

    def check(self) -> None:
        """Assert that every slab is free, or holds blocks, or a snapshot, and that blocks are in order."""
        slabs = [*self._free, *self.blocks.slabs]
        assert len(set(slabs)) == len(slabs), "a slab holds two things"
        assert set(slabs) <= set(range(self.layout.slabs)), "a slab comes from elsewhere"
        self.blocks.check()
