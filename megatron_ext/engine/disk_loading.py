"""Loading of cached entries from disk for waiting requests: decided between two steps by the rank that drives.

A request whose prefix could be resumed further from disk waits for a load, and others overtake it. Whatever becomes of
the load is told to the scheduler in commands (`DiskLoads`), which other ranks obey (`LoadPlacing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from megatron_ext.prefix_cache.disk.entry import Buffer
from megatron_ext.prefix_cache.disk.tier import DiskTier
from megatron_ext.prefix_cache.disk.warm_restart import EntryMemory
from megatron_ext.prefix_cache.matching import last_boundary, resume_point
from megatron_ext.prefix_cache.slabs import NO_CHANGES
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.disk_loads import BeginLoad, EndLoad, LoadCommand, LoadPlaces, NoteRun
from megatron_ext.scheduling.planner import reads_disk
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler

LOOKAHEAD = 16  # waiting requests, from the first, that may begin a load
MAX_ATTEMPTS = 2  # loads of one request while it waits: one may fail, or its entries be evicted before their use
IDLE_WAIT = 0.005  # seconds in a step that can compute nothing
MIN_PREFILL = 16  # tokens in a step whose time says something of prefills


class LoadPlacing:
    """Loads of one scheduler, whose entries this rank's tier reads. For the engine's thread.

    Args:
        scheduler: The scheduler.
        tier: Disk tier of its cache.
        memory: Memory of its cache.
    """

    def __init__(self, scheduler: Scheduler, tier: DiskTier, memory: EntryMemory) -> None:
        self._scheduler, self._tier, self._memory = scheduler, tier, memory

    def follow(self) -> None:
        """Report what this rank has read, in each step."""
        self._tier.follow()

    def obey(self, command: LoadCommand, request: Request | None = None) -> None:
        """Obey a command of the rank that decides; with the request that it names."""
        if isinstance(command, BeginLoad):
            assert request is not None, "a request begins the load"
            self._follow_begin(command, request)
        elif isinstance(command, NoteRun):
            assert request is not None, "the run is one of a request's prefix"
            self._scheduler.disk_loads.note_run(request, command.end)
        elif isinstance(command, EndLoad):
            if command.number in self._tier.loads:
                self._tier.give_up(command.number, command.progress)
            self._scheduler.disk_loads.end(command.number)
        else:
            self.place(command.number)

    def _follow_begin(self, command: BeginLoad, request: Request) -> None:
        loads, tier, size = self._scheduler.disk_loads, self._tier, self._scheduler.limits.block_size
        first = loads.begin(command.number, request, command.end, has_snapshot=command.has_snapshot)
        run = tier.run(command.end, first, has_snapshot=command.has_snapshot)
        tier.begin(run, request.block_hashes, request.tokens, size, command.number)

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


class DiskLoading(LoadPlacing):
    """Loads of one scheduler's waiting requests, on the rank that decides about them. For the engine's thread."""

    def __init__(self, scheduler: Scheduler, tier: DiskTier, memory: EntryMemory) -> None:
        super().__init__(scheduler, tier, memory)
        self._attempts: dict[Request, int] = {}

    def follow(self) -> None:
        """Take note of what the disk has done, in any step; changes nothing that a step in flight uses."""
        self._tier.follow()
        self._scheduler.disk_loads.is_due = self._tier.is_due

    def decide(self, *, may_wait: bool = True) -> None:
        """Place a complete load, give up late ones, and begin others, before a step is planned.

        Args:
            may_wait: Whether nothing else waits for the step.
        """
        self._give_up()
        self._place()
        self._begin()
        if may_wait and self._tier.loads and self._is_all_waiting():
            self._tier.wait(IDLE_WAIT)
            self._tier.follow()
            self._give_up()
            self._place()
        self._note_runs()

    def _give_up(self) -> None:
        loads, tier = self._scheduler.disk_loads, self._tier
        for number in tier.loads.keys() - loads.numbers():  # ended by a quarantine
            tier.give_up(number)
        for number, progress in tier.failed().items():
            tier.counts.loads_failed += 1
            self._end(number, progress)
        for number in tier.late():  # the disk would be late again
            tier.counts.loads_late += 1
            self._attempts |= dict.fromkeys(loads.waiting(number), MAX_ATTEMPTS)
            self._end(number)
        for number in loads.numbers() - tier.loads.keys():  # the tier is off
            loads.end(number)
        for number in [number for number in tier.loads if loads.is_useless(number)]:
            tier.counts.loads_useless += 1
            self._end(number)

    def _end(self, number: int, progress: int | None = None) -> None:
        """Give up a load; with the progress of one that some rank could not read."""
        if number in self._tier.loads:  # a failure of a disk has ended the others
            self._tier.give_up(number, progress)
        self._tier.counts.load_waits += self._scheduler.disk_loads.end(number, progress)

    def _place(self) -> None:
        """Put the first complete load for which there is room into memory; others follow in later steps.

        Requests are admitted before the next one, which could evict what this one brings. A load for which there is no
        room is given up once its deadline is over, since others overtake its requests.
        """
        for number in self._tier.complete():
            if self.place(number):
                return
            if self._tier.is_late(number):
                self._tier.counts.loads_late += 1
                self._end(number)

    def _begin(self) -> None:
        """Begin loads for the first waiting requests, where these are quicker than computing."""
        waiting, cache = self._scheduler.queues.waiting, self._scheduler.cache
        self._attempts = {request: count for request, count in self._attempts.items() if request in waiting}
        if not self._tier.may_begin or cache.available_count <= self._kept:
            return
        for request in list(islice(waiting.line(), LOOKAHEAD)):
            if self._attempts.get(request, 0) < MAX_ATTEMPTS and self._may_load(request):
                self._consider(request)

    @property
    def _kept(self) -> int:
        """Available blocks that loads leave alone."""
        return self._scheduler.cache.kept_for_snapshots if self._scheduler.queues.holding() else 0

    def _may_load(self, request: Request) -> bool:
        """Return whether a request reads the cache, and waits for nothing else."""
        scheduler = self._scheduler
        if not reads_disk(request) or request.unhashed_tokens or request.lacks_mask:
            return False
        hashes = request.block_hashes
        matched = len(scheduler.cache.match(hashes))
        if matched < len(hashes) and scheduler.pending_blocks.leader(hashes[matched]) is not None:
            return False
        return scheduler.disk_loads.awaited_by(request, matched) is None

    def _consider(self, request: Request) -> None:
        scheduler, tier, hashes = self._scheduler, self._tier, request.block_hashes
        cache, size, length = scheduler.cache, scheduler.limits.block_size, len(request.tokens)
        matched = len(cache.match(hashes))
        most = len(hashes) if cache.states is None else last_boundary(length, size) // size
        run = tier.find_run(hashes, matched, min(most, len(hashes)))
        if run is None:
            return
        resume = resume_point(length, hashes[:matched], size, cache.states, cache.depth_of).position
        saved = min(run.end * size, length - 1) - resume
        if saved <= 0 or run.end - run.first > cache.available_count - self._kept or not tier.has_room(run):
            return
        if not tier.pays(run, saved):
            self._attempts[request] = MAX_ATTEMPTS
            return
        self._attempts[request] = self._attempts.get(request, 0) + 1
        number = tier.begin(run, hashes, request.tokens, size)
        scheduler.disk_loads.begin(number, request, run.end, has_snapshot=run.has_snapshot)

    def _note_runs(self) -> None:
        """Tell how far the prefixes of the first waiting requests go on disk, where these may diverge."""
        scheduler, tier = self._scheduler, self._tier
        if scheduler.cache.states is None or not len(tier):
            return
        for request in islice(scheduler.queues.waiting.line(), LOOKAHEAD):
            if not reads_disk(request) or request.unhashed_tokens:
                continue
            hashes = request.block_hashes
            start = request.snapshot_plan.cached_end(len(scheduler.cache.match(hashes)))
            end = tier.end_of_blocks(hashes, start)
            if end > start:
                scheduler.disk_loads.note_run(request, end)

    def _is_all_waiting(self) -> bool:
        """Return whether all requests wait for loads."""
        scheduler = self._scheduler
        return not scheduler.queues.holding() and all(map(scheduler.waits_for_disk, scheduler.queues.waiting))

    def note_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Note the time of a step, which says how quick prefills are.

        Args:
            chunks: Chunks of the step.
            seconds: Time to compute it.
        """
        tokens = sum(chunk.length for chunk in chunks if not chunk.is_decode)
        if tokens >= MIN_PREFILL:
            self._tier.estimates.prefill.note(tokens, seconds)
