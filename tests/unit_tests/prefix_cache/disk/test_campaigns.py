"""Kills, losses of power and flipped bytes: no wrong byte is ever read, and nothing is lost that was committed.

A few of each run with `make test`, a sample with `make test-all`, all of them with `make soak`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.prefix_cache.disk.store import open_directory_store
from tests.unit_tests.prefix_cache.disk.lives import (
    IDENTITY,
    LIMIT,
    content,
    entry_after,
    fast_directory,
    faults,
    files_of,
    is_read,
    live,
    put,
    write_files,
)
from tests.unit_tests.prefix_cache.disk.recorder import Recorder, cuts
from tests.unit_tests.support.source import ROOT


def sizes(quick: int, sample: int, whole: int) -> list[object]:
    """Parameters of a campaign."""
    return [quick, pytest.param(sample, marks=pytest.mark.long), pytest.param(whole, marks=pytest.mark.soak)]


@pytest.mark.parametrize("count", sizes(3, 30, 200))
def test_killed_processes(count):
    """DC-3: after each kill every entry that is listed is whole, and the slot is free."""
    command = [sys.executable, "-m", "tests.unit_tests.prefix_cache.disk.kills", "7", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["kills"] == count
    assert counts["read"] > counts["kills"]


@pytest.mark.parametrize("lives", sizes(1, 6, 40))
def test_lost_power(lives):
    """DC-3: at any point of a recorded life the entries are those of the last transaction, or the one under way."""
    seen = cut_count = 0
    for seed in range(lives):
        rng = random.Random(seed)
        with fast_directory() as folder:
            recorder = Recorder(Path(folder, "cache"))

            def checkpoint(recorder: Recorder = recorder, rng: random.Random = rng) -> None:
                if rng.random() < 0.02:
                    recorder.index.checkpoint()

            live(recorder.store, seed, 120, checkpoint)
            recorder.store.close()
            for number, cut in enumerate(cuts(recorder.log, rng)):
                directory = Path(folder, f"cut-{number}")
                write_files(directory, recorder.others | {f"slot-0/{name}": data for name, data in cut.files.items()})
                store = open_directory_store(directory, IDENTITY, LIMIT)
                listed = frozenset(entry.entry.key for entry in store.entries())
                assert listed in cut.states, f"seed {seed}, cut {number}: {store.drops}"
                assert all(is_read(store, key) for key in listed), f"seed {seed}, cut {number}"
                assert not faults(store), f"seed {seed}, cut {number}: {store.drops}"
                store.check()
                store.close()
                seen += bool(listed)
                cut_count += 1
    print({"lives": lives, "cuts": cut_count, "with_entries": seen})
    assert seen > 50 * lives, "the cuts were before anything was stored"


@pytest.mark.parametrize("trials", sizes(24, 150, 500))
def test_flipped_bytes(trials):
    """DC-3: one flipped byte of any file is noticed or harmless: what is read is right, and the store works on."""
    rng = random.Random(trials)
    missed = 0
    with fast_directory() as folder:
        directory = Path(folder, "cache")
        store = open_directory_store(directory, IDENTITY, LIMIT)
        live(store, 1, 150)
        for number in range(80):  # so that most bytes are in use
            put(store, entry_after(None, [number], used=1.0e6))
        store.commit()
        keys = [entry.entry.key for entry in store.entries()]
        files = files_of(directory)  # as a killed process leaves them
        store.close()
        victims = [name for name in files if name.startswith("slot-0/") and not name.endswith("lock") and files[name]]
        assert len(victims) == 3, "data, index and log"
        for trial in range(trials):
            name = victims[trial % 3]
            position = rng.randrange(len(files[name]))
            damaged = bytearray(files[name])
            damaged[position] ^= rng.randrange(1, 256)
            place = Path(folder, f"trial-{trial}")
            write_files(place, files | {name: bytes(damaged)})
            store = open_directory_store(place, IDENTITY, LIMIT)
            found = sum(is_read(store, key) for key in keys)
            missed += found < len(keys)
            entry = entry_after(None, [trial, 0], used=2.0e6)
            assert put(store, entry), f"{name} at {position}: {store.problem}"
            store.check()
            store.close()
            store = open_directory_store(place, IDENTITY, LIMIT)
            assert is_read(store, entry.key), f"{name} at {position}"
            assert (place / "slot-0" / "data").stat().st_size <= LIMIT
            store.close()
    print({"flips": trials, "with_entries_lost": missed})
    assert missed > trials / 10, "the bytes that were flipped were not in use"


def test_flips_are_not_all_harmless(tmp_path):
    """DC-3: the bytes of an entry that was flipped differ from what was stored."""
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    entry = entry_after(None, [1, 2])
    put(store, entry)
    store.close()
    data = tmp_path / "cache" / "slot-0" / "data"
    raw = bytearray(data.read_bytes())
    assert raw.startswith(content(entry.key)[:4096])
    raw[17] ^= 1
    data.write_bytes(raw)
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    assert not is_read(store, entry.key)
    assert store.use.drops == {"checksum": 1}
    assert entry.key not in store
    store.close()
