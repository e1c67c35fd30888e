"""Kills, losses of power and flipped bytes: no wrong byte is ever read, and no whole entry is lost.

A few of each run with `make test`, a sample with `make test-all`, all of them with `make soak`.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.prefix_cache.disk.store import DiskStore, open_directory_store
from tests.unit_tests.prefix_cache.disk.lives import (
    IDENTITY,
    LIMIT,
    entry_after,
    fast_directory,
    faults,
    files_of,
    is_read,
    live,
    put,
    write_files,
)
from tests.unit_tests.support.source import ROOT

SECTOR = 512
LATER = 4.0e9  # than files are written in a test


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


def after_loss_of_power(now: dict[str, bytes], synced: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """Files that a loss of power may leave: names as of now or as of the last sync, and any sectors of the bytes."""
    left = {}
    for name in sorted(now | synced):
        data = rng.choice((now, synced)).get(name)
        if data is None or name == "lock":
            continue
        image = bytearray(data[: rng.choice((len(data), len(data), rng.randrange(len(data) + 1)))])
        for start in range(0, len(image), SECTOR):
            if rng.random() < 0.01:
                image[start : start + SECTOR] = bytes(len(image[start : start + SECTOR]))
        left[name] = bytes(image)
    return left


@pytest.mark.parametrize("lives", sizes(1, 6, 40))
def test_lost_power(lives):
    """DC-3: at any point of a life the files that are whole can be read, and the others are misses."""
    seen = missed = cuts = 0
    for seed in range(lives):
        rng = random.Random(seed)
        with fast_directory() as folder:
            directory = Path(folder, "cache")
            store = open_directory_store(directory, IDENTITY, LIMIT)
            others = files_of(directory)
            synced: dict[str, bytes] = {}
            sync = store._files.sync

            def sync_and_note(synced: dict = synced, slot: Path = store.slot.path, sync=sync) -> None:
                sync()
                synced.clear()
                synced |= files_of(slot)

            store._files.sync = sync_and_note
            states: list[tuple[dict[str, bytes], int]] = []

            def cut(store: DiskStore = store, states: list = states, synced: dict = synced, rng=rng) -> None:
                now = files_of(store.slot.path)
                state = after_loss_of_power(now, synced, rng)
                states.append((state, sum(data == (synced | now)[name] for name, data in state.items())))

            live(store, seed, 120, cut)
            store.close()
            for number, (state, whole) in enumerate(states):
                place = Path(folder, f"cut-{number}")
                write_files(place, others | {f"slot-0/{name}": data for name, data in state.items()})
                store = open_directory_store(place, IDENTITY, LIMIT)
                listed = [entry.key for entry in store.entries()]
                found = sum(is_read(store, key) for key in listed)
                seen, missed = seen + found, missed + len(listed) - found
                evicted = store.drops["evicted"]
                assert found >= whole - evicted, f"seed {seed}, cut {number}: {store.drops}"
                assert sum(faults(store).values()) == len(state) - found - evicted, f"seed {seed}, cut {number}"
                store.check()
                entry = entry_after(None, [number, 0], used=LATER)
                assert put(store, entry)
                assert is_read(store, entry.key)
                store.close()
                cuts += 1
    print({"lives": lives, "cuts": cuts, "read": seen, "missed": missed})
    assert seen > 50 * lives < missed, "the cuts were before anything was stored"


@pytest.mark.parametrize("trials", sizes(24, 150, 500))
def test_flipped_bytes(trials):
    """DC-3: one flipped byte of any file is noticed: what is read is right, and the store works on."""
    rng = random.Random(trials)
    with fast_directory() as folder:
        directory = Path(folder, "cache")
        store = open_directory_store(directory, IDENTITY, LIMIT)
        live(store, 1, 150)
        for number in range(80):
            put(store, entry_after(None, [number], used=1.0e6))
        keys = [entry.key for entry in store.entries()]
        files = files_of(directory)  # as a killed process leaves them
        store.close()
        victims = [name for name in files if name.endswith((".kv", ".states"))]
        for trial in range(trials):
            name = rng.choice(victims)
            position = rng.choice((rng.randrange(len(files[name])), rng.randrange(24)))  # of the head, too
            damaged = bytearray(files[name])
            damaged[position % len(damaged)] ^= rng.randrange(1, 256)
            place = Path(folder, f"trial-{trial}")
            write_files(place, files | {name: bytes(damaged)})
            store = open_directory_store(place, IDENTITY, LIMIT)
            assert sum(is_read(store, key) for key in keys) == len(keys) - 1, f"{name} at {position}"
            entry = entry_after(None, [trial, 0], used=LATER)
            assert put(store, entry), f"{name} at {position}: {store.problem}"
            store.check()
            store.close()
            store = open_directory_store(place, IDENTITY, LIMIT)
            assert is_read(store, entry.key), f"{name} at {position}"
            store.close()
            shutil.rmtree(place)
