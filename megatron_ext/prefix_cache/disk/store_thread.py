"""Thread that owns the store until it is closed: it writes, reads and commits, and the engine's thread never waits.

All else is a job for it. Times of use come first, then jobs, loads and writes; so an entry that waits to be written is
read from the queue.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from megatron_ext.prefix_cache.disk.entry import Buffer, EntryKey, NewEntry
from megatron_ext.prefix_cache.disk.store import DiskStore
from megatron_ext.prefix_cache.disk.store_use import StoreUse
from megatron_ext.prefix_cache.disk.tier_storage import Content, Loaded, LoadItem, TierLoad, TierStorage
from megatron_ext.threads import lower_priority

T = TypeVar("T")

QUEUE_BYTES = 256 * 1024**2  # that wait to be written, at most; one larger entry may wait alone
COMMIT_SECONDS = 2.0  # without other work, after which written entries are committed
BUSY_FACTOR = 5  # times as many seconds may pass between two commits while there is work
STOP_SECONDS = 5.0  # for work that cannot be interrupted, after the time to stop is over

Job = Callable[[], object]


class StoreThread(TierStorage):
    """Store in a thread of its own; the methods of `TierStorage` are for the engine's thread.

    Args:
        store: Open store, which only this thread uses from now on, and closes.
        queue_bytes: Bytes that may wait to be written.
    """

    def __init__(self, store: DiskStore, queue_bytes: int = QUEUE_BYTES) -> None:
        self._store, self._queue_bytes = store, queue_bytes
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._loads: deque[TierLoad] = deque()
        self._writes: OrderedDict[EntryKey, Content] = OrderedDict()
        self._waiting_bytes = 0
        self._gone: dict[EntryKey, None] = {}
        self._touched: dict[EntryKey, float] = {}  # what the store is to be told
        self._is_off = False
        self._stop_at: float | None = None
        self._commit_at = time.monotonic() + BUSY_FACTOR * COMMIT_SECONDS  # although there is work
        self.use: StoreUse = store.use  # after the last change
        store.observers.append(self)
        store.evicting = self._evicting
        self._thread = threading.Thread(target=self._run, name="prefix cache on disk", daemon=True)
        self._thread.start()

    # Engine's thread

    def write(self, key: EntryKey, size: int, content: Callable[[], Content]) -> bool:
        """Queue an entry; False if the queue is full."""
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + size > self._queue_bytes:
                return False
        taken = content()
        with self._changed:
            self._forget_write(key)
            self._writes[key] = taken
            self._waiting_bytes += size
            self._changed.notify_all()
        return True

    def touch(self, used: Mapping[EntryKey, float]) -> Sequence[EntryKey]:
        """Set times of last use; return the entries that the store has evicted before, which counts as told."""
        with self._changed:
            gone = [key for key in used if key in self._gone]
            for key in gone:
                del self._gone[key]
            for key in used.keys() & self._writes.keys():
                entry, buffers = self._writes[key]
                self._writes[key] = replace(entry, used=used[key]), buffers
            self._touched.update(used)
            self._changed.notify_all()
        return gone

    def remove(self, keys: Sequence[EntryKey]) -> None:
        """Remove stored and queued entries, and wait until the medium has forgotten them."""
        self.drop(keys)
        self.run(lambda _: None)  # jobs are done in order

    def drop(self, keys: Sequence[EntryKey]) -> None:
        """Remove stored and queued entries."""
        with self._changed:
            for key in keys:
                self._forget_write(key)
        self._add(lambda: self._store.forget(keys))

    def _forget_write(self, key: EntryKey) -> None:
        found = self._writes.pop(key, None)
        if found is not None:
            self._waiting_bytes -= _size(found[1])

    def _add(self, job: Job) -> None:
        with self._changed:
            assert self._stop_at is None, "the thread is being stopped"
            self._jobs.append(job)
            self._changed.notify_all()

    def load(self, load: TierLoad) -> None:
        """Queue a load."""
        with self._changed:
            self._loads = deque(one for one in self._loads if not one.is_given_up)
            self._loads.append(load)
            self._changed.notify_all()

    def gone(self) -> Sequence[EntryKey] | None:
        """Return the entries that have gone since the last call; None once the store is off."""
        with self._changed:
            gone, self._gone = list(self._gone), {}
            return None if self._is_off else gone

    def wait(self, loads: Iterable[TierLoad], seconds: float) -> None:
        """Wait for the end of a load, unless one has ended that is not reported yet."""
        waiting = [load for load in loads if load.found is None]
        with self._changed:
            self._changed.wait_for(lambda: any(load.loaded is not None for load in waiting), seconds)

    def clear(self) -> None:
        """Forget all, and wait until the medium has forgotten it."""
        with self._changed:
            self._drop_data()
        self.run(DiskStore.clear)
        with self._changed:
            self._gone.clear()

    def run(self, job: Callable[[DiskStore], T], seconds: float | None = None) -> T:
        """Do a job with the store after the waiting jobs; return its result, or raise its error.

        Raises:
            concurrent.futures.TimeoutError: The job has not ended after `seconds`.
        """
        result: Future[T] = Future()

        def do() -> None:
            try:
                found = job(self._store)
            except BaseException as error:
                result.set_exception(error)
            else:
                self.use = self._store.use
                result.set_result(found)

        self._add(do)
        return result.result(seconds)

    def put(self, content: Content, seconds: float) -> bool:
        """Write an entry now, and wait at most `seconds`; see `DiskStore.put` and `run`."""
        entry, buffers = content

        def write(store: DiskStore) -> bool:
            with self._changed:
                self._forget_write(entry.key)
            return entry.key in store or store.put(entry, buffers)

        return self.run(write, seconds)

    def _drop_data(self) -> None:
        self._loads.clear()
        self._writes.clear()
        self._waiting_bytes = 0

    def stop(self, seconds: float) -> bool:
        """Write queued entries for at most `seconds`, close the store and end the thread; no job may follow.

        Returns:
            False if the disk does not answer.
        """
        with self._changed:
            self._loads.clear()
            self._stop_at = time.monotonic() + seconds
            self._changed.notify_all()
        self._thread.join(seconds + STOP_SECONDS)
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Drop queued entries once the thread is being stopped; safe in any thread and in signal handlers."""
        if self._stop_at is not None:
            self._stop_at = 0.0

    @property
    def left_out(self) -> int:
        """Number of entries that wait to be written, or were left out at the end."""
        return len(self._writes)

    # Thread of the store

    def _run(self) -> None:
        lower_priority()
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:
                self._store.fail(error)
            self.use = self._store.use
            if self._store.problem is not None and not self._is_off:
                self._fail()
        self._store.close()
        self.use = self._store.use

    def _fail(self) -> None:
        with self._changed:
            self._is_off = True
            self._gone.clear()  # all is
            for load in self._loads:
                load.loaded = Loaded((), 0.0)
            self._drop_data()  # jobs stay: callers wait for them
            self._changed.notify_all()

    def _next(self) -> Job | None:
        """Wait for something to do, and return it; None at the end."""
        with self._changed:
            has_work = self._changed.wait_for(self._has_work, COMMIT_SECONDS)
            if not has_work or (self._store.has_changes and time.monotonic() >= self._commit_at):
                self._commit_at = time.monotonic() + BUSY_FACTOR * COMMIT_SECONDS
                return self._store.commit
            if self._touched:
                return self._pass_touches
            if self._jobs:
                return self._jobs.popleft()
            if self._loads:
                load = self._loads.popleft()
                return lambda: self._load(load)
            if self._stop_at is not None and (not self._writes or time.monotonic() >= self._stop_at):
                return None
            key, content = self._writes.popitem(last=False)
            self._waiting_bytes -= _size(content[1])
            return lambda: self._write(key, content)

    def _has_work(self) -> bool:
        return bool(self._touched or self._jobs or self._loads or self._writes or self._stop_at is not None)

    def _write(self, key: EntryKey, content: Content) -> None:
        entry, buffers = content
        if key in self._store:
            self._store.touch(key, entry.used)
        elif not self._store.put(entry, buffers):
            self.on_removed([key])

    def _pass_touches(self) -> None:
        with self._changed:
            touched, self._touched = self._touched, {}
            for key, used in touched.items():
                self._store.touch(key, used)

    @contextlib.contextmanager
    def _evicting(self) -> Iterator[None]:
        """Keep touches out while victims are chosen: a touch comes before the choice, or after their eviction."""
        with self._changed:
            self._pass_touches()
            yield

    def on_stored(self, entry: NewEntry) -> None:
        """Do nothing, since queued entries already count as stored; see `StoreObserver`, also for the next method."""

    def on_removed(self, keys: Iterable[EntryKey]) -> None:
        """Note removed entries, for the engine's thread."""
        with self._changed:
            self._gone |= dict.fromkeys(keys)

    def _load(self, load: TierLoad) -> None:
        started = time.perf_counter()
        contents: list[Sequence[Buffer]] = []
        try:
            for item in load.items:
                buffers = None if load.is_given_up else self._read(item)
                if buffers is None:
                    break
                contents.append(buffers)
        finally:
            with self._changed:
                load.loaded = Loaded(contents, time.perf_counter() - started)
                self._changed.notify_all()

    def _read(self, item: LoadItem) -> Sequence[Buffer] | None:
        with self._changed:
            waiting = self._writes.get(item.key)
        if waiting is not None:
            return waiting[1]
        try:
            buffers = [bytearray(size) for size in item.sizes]
        except MemoryError as error:
            self._store.leave_out(error)
            self._store.forget([item.key])
            return None
        return buffers if self._store.read(item.key, buffers, item.tokens) is not None else None


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in buffers)
