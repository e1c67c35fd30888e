"""Thread that owns the store: writes, loads and removals from the engine's thread, which never waits."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_ext.prefix_cache.disk import store_thread
from megatron_ext.prefix_cache.disk.entry import Buffer, EntryKind, NewEntry
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.prefix_cache.disk.store import DiskStore, open_directory_store
from megatron_ext.prefix_cache.disk.store_thread import StoreThread
from megatron_ext.prefix_cache.disk.tier_storage import LoadItem, TierLoad
from tests.unit_tests.prefix_cache.disk.lives import IDENTITY, LIMIT, content, entry_after, put, stored_in

PATIENCE = 100  # seconds; only what hangs takes as long


class Gate:
    """Writes of bytes that wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        write = EntryFiles.write

        def wait_and_write(*arguments: object) -> None:
            self.is_reached.set()
            assert self.is_open.wait(PATIENCE)
            write(*arguments)

        monkeypatch.setattr(EntryFiles, "write", wait_and_write)

    def open_with_the_next_job(self, monkeypatch: pytest.MonkeyPatch, thread: StoreThread) -> None:
        """Let writes through when something else waits for the thread."""
        add = thread._add
        monkeypatch.setattr(thread, "_add", lambda job: (add(job), self.is_open.set()))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    found = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    yield found
    found.close()


def settle(thread: StoreThread) -> None:
    """Wait until nothing waits to be written."""
    left = [1]
    while left.pop():  # jobs go before writes
        thread.run(lambda _: left.append(thread.left_out))


def give(thread: StoreThread, entry: NewEntry) -> bool:
    data = content(entry.key)
    return thread.write(entry.key, len(data), lambda: (entry, [data]))


def item(entry: NewEntry, tokens: list[int] | None = None) -> LoadItem:
    return LoadItem(entry.key, [len(content(entry.key))], tokens)


def begin(thread: StoreThread, *items: LoadItem) -> TierLoad:
    """Begin a load."""
    load = TierLoad(1, items, 0, 0.0)
    thread.load(load)
    return load


def read(thread: StoreThread, load: TierLoad) -> Sequence[Sequence[Buffer]]:
    """What a load has read in the end."""
    thread.wait([load], PATIENCE)
    return load.loaded.contents


def chain(count: int) -> list[NewEntry]:
    found: list[NewEntry] = []
    for number in range(count):
        found.append(entry_after(found[-1] if found else None, [number] * 4))
    return found


def test_what_is_written_is_read_again(store):
    """EX-11: after the writes, and in the order that was asked for."""
    thread, entries = StoreThread(store), chain(5)
    assert all(give(thread, entry) for entry in entries)
    found = read(thread, begin(thread, *map(item, entries[::-1])))
    assert [bytes(buffers[0]) for buffers in found] == [content(one.key) for one in entries[::-1]]
    assert thread.stop(PATIENCE)
    assert all(one.key in store for one in entries)


def test_an_entry_that_waits_to_be_written_is_read_from_the_queue(store, monkeypatch):
    """EX-11: loads go before writes."""
    gate, (first, second) = Gate(monkeypatch), chain(2)
    thread = StoreThread(store)
    give(thread, first)
    assert gate.is_reached.wait(PATIENCE)
    give(thread, second)
    load = begin(thread, item(second))
    gate.is_reached.clear()
    gate.is_open.set()
    assert bytes(read(thread, load)[0][0]) == content(second.key)
    assert thread.stop(PATIENCE)


def test_a_full_queue_takes_nothing_and_copies_nothing(store, monkeypatch):
    """EX-11: one entry may wait, however large."""
    gate, entries = Gate(monkeypatch), chain(3)
    thread = StoreThread(store, queue_bytes=1)
    give(thread, entries[0])
    assert gate.is_reached.wait(PATIENCE)
    assert give(thread, entries[1])
    assert not thread.write(entries[2].key, 1, lambda: pytest.fail("its bytes were copied"))
    gate.is_open.set()
    assert thread.stop(PATIENCE)
    assert [one.key in store for one in entries] == [True, True, False]


def test_entries_that_are_evicted_on_disk_are_named(store):
    """EX-11."""
    thread, entries = StoreThread(store), []
    for number in range(300):
        entries.append(entry_after(None, [number] * 4, used=float(number)))
        give(thread, entries[-1])
    assert thread.stop(PATIENCE)
    gone = thread.gone()
    assert set(gone) == {one.key for one in entries if one.key not in store}
    assert gone[0] == entries[0].key


def test_an_entry_that_the_store_refuses_is_named(store):
    """EX-11: a load that waits for it would begin, and fail."""
    thread = StoreThread(store)
    for number in range(300):
        give(thread, entry_after(None, [number] * 4, used=float(number)))
    snapshots = (entry_after(None, [number] * 4, EntryKind.SNAPSHOT, used=-1.0) for number in range(99))
    refused = next(one for one in snapshots if len(content(one.key)) > LIMIT // 32)
    give(thread, refused)
    assert thread.stop(PATIENCE)
    assert thread.gone()[-1] == refused.key


def test_bytes_that_wait_are_those_of_the_queue(store, monkeypatch):
    """EX-11: bytes that stay counted leave a queue without room; what waits no longer is named as gone."""
    gate, entries = Gate(monkeypatch), chain(5)
    thread = StoreThread(store)

    def waiting() -> int:
        assert thread._waiting_bytes == sum(len(content(key)) for key in thread._writes)
        return len(thread._writes)

    give(thread, entries[0])
    assert gate.is_reached.wait(PATIENCE)
    for one in (entries[1], entries[1], entries[2]):
        give(thread, one)
    assert waiting() == 2
    thread.drop([entries[1].key])
    assert waiting() == 1
    give(thread, entries[3])
    gate.open_with_the_next_job(monkeypatch, thread)
    thread.clear()
    assert waiting() == 0
    gate.is_reached.clear()
    thread.hurry()
    give(thread, entries[4])
    assert gate.is_reached.wait(PATIENCE), "without a stop there is nothing to hurry"
    assert thread.stop(PATIENCE)
    assert [one.key in store for one in entries] == [False] * 4 + [True]


def test_what_is_on_disk_already_is_used_again(store):
    """EX-11: its time decides when it leaves the disk."""
    thread, (entry,) = StoreThread(store), chain(1)
    give(thread, entry)
    settle(thread)
    give(thread, dataclasses.replace(entry, used=5.0))
    assert thread.stop(PATIENCE)
    assert store.find(entry.key).used == 5.0


def test_uses_do_not_pile_up_while_the_disk_hangs(store, monkeypatch):
    """EX-11: the last one counts; each eviction from memory tells some."""
    gate, (entry,) = Gate(monkeypatch), chain(1)
    thread = StoreThread(store)
    give(thread, entry)
    assert gate.is_reached.wait(PATIENCE)
    for number in range(9):
        thread.touch({entry.key: float(number)})
    assert len(thread._jobs) + len(thread._touched) == 1
    gate.is_open.set()
    assert thread.stop(PATIENCE)
    assert store.find(entry.key).used == 8.0


def test_a_busy_store_commits(store, monkeypatch):
    """EX-11: uses and removals would reach the medium with the end of the traffic alone."""
    monkeypatch.setattr(store_thread, "BUSY_FACTOR", 0)
    gate, entries, left = Gate(monkeypatch), chain(3), []
    thread, commit = StoreThread(store), store.commit
    monkeypatch.setattr(store, "commit", lambda: (left.append(thread.left_out), commit()))
    for entry in entries:
        give(thread, entry)
    gate.is_open.set()
    assert thread.stop(PATIENCE)
    assert {1, 2} <= set(left)


def test_loads_that_are_given_up_do_not_pile_up_while_the_disk_hangs(store, monkeypatch):
    """EX-11."""
    gate, (entry,) = Gate(monkeypatch), chain(1)
    thread = StoreThread(store)
    give(thread, entry)
    assert gate.is_reached.wait(PATIENCE)
    for _ in range(9):
        begin(thread, item(entry)).is_given_up = True
    assert len(thread._loads) == 1
    gate.is_open.set()
    assert thread.stop(PATIENCE)


def test_a_load_that_has_ended_is_not_waited_for(store, monkeypatch):
    """EX-11: the engine would be idle for as long as it may wait."""
    thread, (entry,) = StoreThread(store), chain(1)
    load = begin(thread, item(entry))
    read(thread, load)
    assert thread.stop(PATIENCE)
    monkeypatch.setattr(thread._changed, "wait", lambda *_: pytest.fail("it waits"))
    thread.wait([load], PATIENCE)


def test_no_job_follows_a_stop(store):
    """EX-11: its caller would wait for ever."""
    thread = StoreThread(store)
    assert thread.stop(PATIENCE)
    with pytest.raises(AssertionError, match="is being stopped"):
        thread.run(len, 0)


def test_a_clear_forgets_what_has_happened(store):
    """EX-11: entries of before it are not dropped from those that come after it."""
    thread, (entry,) = StoreThread(store), chain(1)
    give(thread, entry)
    settle(thread)
    thread.run(lambda store: store.forget([entry.key]))
    thread.clear()
    assert thread.gone() == []
    assert thread.stop(PATIENCE)


def test_a_stop_reads_nothing_more(store, monkeypatch):
    """EX-11: loads that wait would use up the time to write."""
    gate, entries = Gate(monkeypatch), chain(2)
    thread = StoreThread(store)
    give(thread, entries[0])
    assert gate.is_reached.wait(PATIENCE)
    load = begin(thread, item(entries[1]))
    join = thread._thread.join
    monkeypatch.setattr(thread._thread, "join", lambda timeout: (gate.is_open.set(), join(timeout)))
    assert thread.stop(PATIENCE)
    assert load.loaded is None


def test_a_use_comes_before_the_choice_of_what_goes_or_names_what_is_gone(store, monkeypatch):
    """EX-11: so no entry that leaves memory is in neither tier."""
    entries = [entry_after(None, [number] * 4, used=float(number)) for number in range(400)]
    assert all(put(store, one) for one in entries[:300])
    old = [one for one in entries[:300] if one.key in store]
    thread, chooses, may_choose, evicting = StoreThread(store), threading.Event(), threading.Event(), store.evicting

    @contextlib.contextmanager
    def wait_and_evict() -> Iterator[None]:
        chooses.set()
        assert may_choose.wait(PATIENCE)
        with evicting():
            yield

    store.evicting = wait_and_evict
    for one in entries[300:]:
        give(thread, one)
    assert chooses.wait(PATIENCE)
    assert thread.touch({old[0].key: 1000.0, entries[-1].key: 1001.0}) == []
    gate = Gate(monkeypatch)
    may_choose.set()
    assert gate.is_reached.wait(PATIENCE)
    assert old[0].key in store
    assert old[1].key not in store
    assert thread.touch({old[1].key: 1002.0}) == [old[1].key]
    gate.is_open.set()
    assert thread.stop(PATIENCE)
    gone = thread.gone()
    assert old[1].key not in gone
    assert {*gone} == {one.key for one in (*old[2:], *entries[300:]) if one.key not in store}
    assert [store.find(one.key).used for one in (old[0], entries[-1])] == [1000.0, 1001.0]


def test_a_load_that_is_given_up_reads_no_more(store, monkeypatch):
    """EX-11: others wait for the disk."""
    read_entry, entries, is_reading, may_read = store.read, chain(1), threading.Event(), threading.Event()
    thread = StoreThread(store)
    give(thread, entries[0])
    settle(thread)

    def wait_and_read(*arguments: object) -> bool:
        is_reading.set()
        assert may_read.wait(PATIENCE)
        return read_entry(*arguments)

    monkeypatch.setattr(store, "read", wait_and_read)
    load = begin(thread, item(entries[0]), item(entries[0]))
    assert is_reading.wait(PATIENCE)
    load.is_given_up = True
    is_reading.clear()
    may_read.set()
    thread.run(lambda _: None)
    assert not is_reading.is_set(), "it reads on"
    assert len(read(thread, begin(thread, item(entries[0])))) == 1
    thread.stop(PATIENCE)


def test_removed_entries_are_off_the_medium(store, tmp_path):
    """EX-15: those that wait to be written, too."""
    thread, entries = StoreThread(store), chain(4)
    for one in entries:
        give(thread, one)
    thread.remove([one.key for one in entries[1:]])
    assert thread.stop(PATIENCE)
    assert {one.key for one in stored_in(tmp_path / "cache" / "slot-0")} <= {entries[0].key}


def test_clearing_returns_when_the_medium_has_forgotten(store, tmp_path, monkeypatch):
    """EX-11, DC-4: what waits is not written after it."""
    gate, entries = Gate(monkeypatch), chain(4)
    thread = StoreThread(store)
    give(thread, entries[0])
    assert gate.is_reached.wait(PATIENCE)
    for one in entries[1:]:
        give(thread, one)
    gate.open_with_the_next_job(monkeypatch, thread)
    thread.clear()
    assert (len(store), thread.use.blocks, thread.left_out) == (0, 0, 0)
    assert thread.stop(PATIENCE)
    assert stored_in(tmp_path / "cache" / "slot-0") == []


def test_the_end_leaves_out_what_it_has_no_time_for(store, monkeypatch):
    """EX-11, DC-1."""
    gate, entries = Gate(monkeypatch), chain(4)
    thread = StoreThread(store)
    for one in entries:
        give(thread, one)
    assert gate.is_reached.wait(PATIENCE)
    join = thread._thread.join
    monkeypatch.setattr(thread._thread, "join", lambda timeout: (gate.is_open.set(), join(timeout)))
    monkeypatch.setattr(store_thread, "STOP_SECONDS", PATIENCE)
    assert thread.stop(0.0)
    assert thread.left_out == 3
    assert [one.key in store for one in entries] == [True, False, False, False]


def test_a_failure_of_the_directory_ends_loads_and_is_told(store, monkeypatch):
    """EX-11, DC-3: a load is asked for while the write that fails is under way."""
    thread, entries = StoreThread(store), chain(2)
    load = TierLoad(1, [item(entries[1])], 0, 0.0)

    def fail(*_: object) -> None:
        thread.load(load)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(EntryFiles, "write", fail)
    give(thread, entries[0])
    assert len(read(thread, load)) == 0
    assert thread.gone() is None
    assert thread.stop(PATIENCE)
    assert not thread.use.is_on
    assert len(store) == 0


@pytest.mark.parametrize(
    "forget", [StoreThread.clear, lambda thread: thread.remove([chain(1)[0].key])], ids=["clear", "remove"]
)
def test_a_failure_of_the_directory_holds_up_no_caller(store, monkeypatch, forget):
    """EX-11, DC-3: what is to be forgotten is asked for while the write that fails is under way."""
    thread = StoreThread(store)
    asking, has_begun = threading.Thread(target=forget, args=(thread,), daemon=True), threading.Event()

    def fail(*_: object) -> None:
        asking.start()
        while not thread._jobs and asking.is_alive():
            pass
        has_begun.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(EntryFiles, "write", fail)
    give(thread, chain(1)[0])
    assert has_begun.wait(PATIENCE)
    asking.join(PATIENCE)
    assert not asking.is_alive(), "the caller waits for ever"
    assert thread.stop(PATIENCE)


@pytest.mark.parametrize("call", ["read", "put", "commit"])
def test_an_unexpected_error_ends_the_use_of_the_store_alone(store, monkeypatch, caplog, call):
    """DC-3: the thread lives, so no caller waits for it; the line has where it was."""
    thread, (entry,) = StoreThread(store), chain(1)

    def fail(*_: object) -> None:
        raise LookupError("planted")

    monkeypatch.setattr(store, f"_{call}", fail)
    give(thread, entry)
    thread.run(lambda store: store.commit())
    settle(thread)
    assert read(thread, begin(thread, item(entry))) == []
    thread.clear()
    assert not thread.use.is_on
    assert thread.gone() is None
    assert thread.stop(PATIENCE)
    (record,) = [one for one in caplog.records if "planted; serving goes on without it" in one.getMessage()]
    assert record.exc_info


def test_an_error_of_a_job_is_that_of_its_caller(store):
    """DC-3: the thread goes on."""
    thread, (entry,) = StoreThread(store), chain(1)

    def fail(_: DiskStore) -> None:
        raise LookupError("planted")

    with pytest.raises(LookupError, match="planted"):
        thread.run(fail)
    give(thread, entry)
    assert thread.stop(PATIENCE)
    assert (thread.use.is_on, thread.use.written) == (True, 1)


def test_an_error_outside_the_store_ends_its_use(store, monkeypatch):
    """DC-3: what observes it, for one."""
    thread, entries = StoreThread(store), chain(2)
    monkeypatch.setattr(thread, "_write", None)
    give(thread, entries[0])
    settle(thread)
    thread.clear()
    assert not thread.use.is_on
    assert thread.stop(PATIENCE)
