"""Loads of cached entries from disk as every rank obeys them: begun, placed and ended."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.prefix_cache.disk.data_file import Buffer
from megatron_ext.prefix_cache.disk.entry_copies import LoadTarget
from megatron_ext.prefix_cache.disk.tier import DiskTier
from megatron_ext.prefix_cache.slabs import NO_CHANGES
from megatron_ext.scheduling.disk_loads import BeginLoad, EndLoad, LoadCommand, LoadPlaces, NoteRun
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


class LoadPlacing:
    """Loads of one scheduler, whose entries this rank's tier reads. For the engine's thread.

    Args:
        scheduler: The scheduler.
        tier: Disk tier of its cache.
        memory: Memory of its cache.
    """

    def __init__(self, scheduler: Scheduler, tier: DiskTier, memory: LoadTarget) -> None:
        self._scheduler, self._tier, self._memory = scheduler, tier, memory

    def follow(self) -> None:
        """Report what this rank has read, in each step."""
        self._tier.follow()

    def obey(self, command: LoadCommand, request: Request | None = None) -> None:
        """Obey a command of the rank that decides; with the request that it names."""
        if isinstance(command, BeginLoad):
            assert request is not None, "a request begins the load"
            self._begin(command, request)
        elif isinstance(command, NoteRun):
            assert request is not None, "the run is one of a request's prefix"
            self._scheduler.disk_loads.note_run(request, command.end)
        elif isinstance(command, EndLoad):
            if command.number in self._tier.loads:
                self._tier.give_up(command.number, command.progress)
            self._scheduler.disk_loads.end(command.number)
        else:
            self.place(command.number)

    def _begin(self, command: BeginLoad, request: Request) -> None:
        if request.sequence.unhashed_tokens:  # the rank that decides has hashed them ahead
            self._scheduler.hash_ahead()
        loads, tier, size = self._scheduler.disk_loads, self._tier, self._scheduler.limits.block_size
        first = loads.begin(command.number, request, command.end, has_snapshot=command.has_snapshot)
        run = tier.run(command.end, first, has_snapshot=command.has_snapshot)
        tier.begin(run, request.block_hashes, request.sequence.tokens, size, command.number)

    def place(self, number: int) -> bool:
        """Put a complete load into memory; return False if there is no room for it now."""
        loads, cache = self._scheduler.disk_loads, self._scheduler.cache
        places = loads.reserve(number)
        if places is None:
            return False
        try:
            if cache.changes != NO_CHANGES:
                self._memory.make_changes(cache.changes)
                cache.note_changes_sent()
                cache.note_changes_applied()
            self._write(places, self._tier.contents(number))
        except BaseException:
            loads.give_back(places)
            self._scheduler.suspend()  # empties the cache and requeues requests: their blocks may be half moved
            raise
        self._tier.counts.load_waits += loads.publish(places)
        return True

    def _write(self, places: LoadPlaces, contents: Sequence[Sequence[Buffer]]) -> None:
        """Write the entries that are not in memory by now."""
        for block, buffers in zip(places.blocks, contents[places.known :], strict=False):
            self._memory.write_block(block, buffers)
        if places.slot is not None:
            self._memory.write_snapshot(places.slot, places.block_hash, contents[-1])
