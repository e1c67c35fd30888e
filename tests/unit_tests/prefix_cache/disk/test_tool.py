"""`tools/prefix_cache.py`: what it lists, that it finds damage, and which files it removes."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from megatron_ext.commands.prefix_cache import BAD_USAGE, DONE, FOUND_DAMAGE, main
from megatron_ext.prefix_cache.disk.entry import EntryKind
from megatron_ext.prefix_cache.disk.store import open_directory_store
from tests.unit_tests.prefix_cache.disk.lives import IDENTITY, LIMIT, content, entry_after, put


def filled(directory) -> dict[str, bytes]:
    """A directory with a prefix of two blocks and a snapshot, and one of another model; the contents of the entries."""
    store = open_directory_store(directory, IDENTITY, LIMIT)
    first = entry_after(None, [1, 2, 3, 4], used=time.time() - 7200.5)
    second = entry_after(first, [5, 6, 7, 8], used=time.time() - 3700)
    snapshot = entry_after(first, [5, 6, 7, 8], EntryKind.SNAPSHOT, used=time.time() - 3700)
    for entry in (first, second, snapshot):
        put(store, entry)
    store.close()
    store = open_directory_store(directory, bytes(range(1, 33)), LIMIT)
    put(store, entry_after(None, [9], used=time.time() - 200_000))
    store.close()
    return {str(entry.key.kind): content(entry.key) for entry in (first, second, snapshot)}


def test_entries_by_model(tmp_path, capsys):
    """DC-6."""
    filled(tmp_path / "cache")
    assert main([str(tmp_path / "cache"), "list"]) == DONE
    head, *models = capsys.readouterr().out.splitlines()
    assert head == "slot-0: 4 entries of 2 models"
    assert sorted(models) == [
        "  00010203: 2 blocks, 1 snapshots, 0.0 MiB, used 1.0 h ago",
        "  01020304: 1 blocks, 0 snapshots, 0.0 MiB, used 55.6 h ago",
    ]
    store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
    assert (store.use.blocks, store.use.snapshots, store.use.other_entries) == (2, 1, 1)
    store.close()


def test_damage_is_found_once(tmp_path, capsys):
    """DC-6."""
    filled(tmp_path / "cache")
    assert main([str(tmp_path / "cache"), "verify"]) == DONE
    assert "4 entries are sound, dropped: none" in capsys.readouterr().out
    data = max((tmp_path / "cache" / "slot-0").iterdir(), key=lambda path: path.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[100] ^= 4
    data.write_bytes(raw)
    assert main([str(tmp_path / "cache"), "verify"]) == FOUND_DAMAGE
    assert "3 entries are sound, dropped: {'checksum': 1}" in capsys.readouterr().out
    assert main([str(tmp_path / "cache"), "verify"]) == DONE


def test_files_of_an_earlier_format_are_erased_on_demand_alone(tmp_path, capsys):
    """DC-4: another version may still use them."""
    directory = tmp_path / "cache"
    filled(directory)
    marker, data = directory / "prefix_cache_marker", directory / "slot-0" / "data"
    marker.write_text("megatron_ext prefix cache, format 6\n")
    data.touch(0o600)
    for action in ("list", "verify"):
        assert main([str(directory), action]) == BAD_USAGE
        assert "has the format 6 of an earlier version; `erase` removes its entries" in capsys.readouterr().err
    assert (data.exists(), marker.read_text()[-2:]) == (True, "6\n")
    assert main([str(directory), "erase"]) == DONE
    assert os.listdir(directory / "slot-0") == ["lock"]


@pytest.mark.parametrize("pattern", ["slot-0", "slot-0/*.kv", "slot-0/*.states"])
def test_erase_follows_no_link(tmp_path, pattern):
    """DC-4: what a link in the directory points to stays as it is."""
    directory, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    filled(directory)
    name = next(directory.glob(pattern)).relative_to(directory)
    (directory / name).rename(elsewhere)
    (directory / name).symlink_to(elsewhere)
    files = [one for one in sorted([elsewhere, *elsewhere.glob("*")]) if one.is_file()]
    before = [one.read_bytes() for one in files]
    assert main([str(directory), "erase"]) == BAD_USAGE
    assert (directory / name).is_symlink()
    assert pattern == "slot-0" or sorted(os.listdir(directory / "slot-0")) == sorted([name.name, "lock"])
    assert [one.read_bytes() for one in files] == before


def test_a_held_slot_is_named_after_all_others(tmp_path, capsys):
    """DC-4: its files stay, and the message says what erases them; free slots are listed, read and erased."""
    directory = tmp_path / "cache"
    filled(directory)
    with contextlib.closing(open_directory_store(directory, IDENTITY, LIMIT)) as store:
        other = open_directory_store(directory, IDENTITY, LIMIT)
        put(other, entry_after(None, [77, 78, 79, 80]))
        other.close()
        for action, shown in (("list", "1 entries"), ("verify", "1 entries are sound"), ("erase", "1 entries erased")):
            assert main([str(directory), action]) == BAD_USAGE
            printed = capsys.readouterr()
            assert printed.out.startswith("slot-1: ")
            assert shown in printed.out
            assert f"slot-0 is held by process {os.getpid()}; stop it first" in printed.err
            assert "POST /reset_prefix_cache" in printed.err
        assert len(store.all_entries()) == 4
