"""Directories of the store: which are accepted, who holds a slot, and which files are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk import slot as slots
from megatron_ext.prefix_cache.disk.entry import NewEntry
from megatron_ext.prefix_cache.disk.slot import (
    MARKER,
    DiskUnavailableError,
    SlotHeldError,
    take_all_slots,
    take_slot,
    take_slot_of_rank,
)
from megatron_ext.prefix_cache.disk.store import open_directory_store
from tests.unit_tests.prefix_cache.disk.lives import (
    IDENTITY,
    LIMIT,
    entry_after,
    fast_directory,
    file_of,
    is_read,
    put,
)
from tests.unit_tests.support.foreign import ForeignFiles
from tests.unit_tests.support.source import ROOT


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "cache"


def test_each_process_gets_a_slot_of_its_own(directory):
    """DC-4."""
    first, second = take_slot(directory), take_slot(directory)
    assert [slot.path.name for slot in (first, second)] == ["slot-0", "slot-1"]
    first.close()
    again = take_slot(directory)
    assert again.path.name == "slot-0"
    again.close()
    second.close()


def test_a_held_slot_is_refused_by_name(directory):
    """DC-4."""
    code = f"""
import sys
from pathlib import Path
from megatron_ext.prefix_cache.disk.slot import take_slot_of_rank
slot = take_slot_of_rank(Path({str(directory)!r}), 0, 1)
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(SlotHeldError, match=f"slot-0-rank-1 is held by process {holder.pid}$"):
            take_slot_of_rank(directory, 0, 1)
        (), (held,) = take_all_slots(directory)
        assert str(held).endswith(f"slot-0-rank-1 is held by process {holder.pid}")
        holder.kill()
    (slot,), () = take_all_slots(directory)
    assert slot.path.name == "slot-0-rank-1"
    slot.close()


def test_a_directory_with_other_files_is_refused(directory):
    directory.mkdir()
    (directory / "thesis.txt").write_text("words")
    with pytest.raises(ConfigError, match=f"{directory} has other files and no {MARKER}"):
        take_slot(directory)
    assert os.listdir(directory) == ["thesis.txt"]


def test_tools_create_nothing(directory):
    with pytest.raises(DiskUnavailableError):
        take_all_slots(directory)
    directory.mkdir()
    with pytest.raises(ConfigError, match=f"has no {MARKER}"):
        take_all_slots(directory)
    assert not os.listdir(directory)


def test_a_damaged_marker_is_written_again(directory, caplog):
    """DC-3: like all other damage it costs no start, and the slots stay; beside other files it is refused."""
    open_directory_store(directory, IDENTITY, LIMIT).close()
    (directory / "audits").mkdir()
    marker, text = directory / MARKER, (directory / MARKER).read_bytes()
    flips = [bytes([*text[:i], text[i] ^ 1 << bit, *text[i + 1 :]]) for i in range(len(text)) for bit in range(8)]
    for damaged in (b"", text[:-1], *flips):
        marker.write_bytes(damaged)
        take_slot(directory).close()
        assert marker.read_bytes() == text
    messages = [one for one in caplog.messages if "the marker is written again" in one]
    assert len(messages) == len(flips) + 2
    assert sum("has a damaged" in one for one in messages) == len(messages) - 3, "7 becomes 3, 5 or 6"
    marker.write_bytes(text[:-1])
    (directory / "thesis.txt").write_text("words")
    with pytest.raises(ConfigError, match="is not the marker of a prefix cache"):
        take_slot(directory)
    assert marker.read_bytes() == text[:-1]


def test_a_marker_that_was_not_finished_is_written_again(directory):
    directory.mkdir()
    (directory / MARKER).touch(mode=0o600)
    take_slot(directory).close()
    take_slot(directory).close()


def test_a_newer_format_is_refused_by_name(directory):
    """DC-2."""
    take_slot(directory).close()
    (directory / MARKER).write_text("megatron_ext prefix cache, format 8\n")
    with pytest.raises(ConfigError, match=f"{directory} has format 8 of a later version; this one reads format 7"):
        take_slot(directory)


def test_files_of_an_earlier_format_are_erased_and_said(directory, caplog):
    """DC-2: they would lie there for ever; entries of this format are kept beside them."""
    entry = kept_entry(directory)
    (directory / MARKER).write_text("megatron_ext prefix cache, format 1\n")
    for name in ("data", "index.sqlite", "index.sqlite-wal", "notes"):
        (directory / "slot-0" / name).touch(0o600)
    store = open_directory_store(directory, IDENTITY, LIMIT)
    assert sorted(os.listdir(directory / "slot-0")) == sorted([file_of(directory, entry.key).name, "lock", "notes"])
    assert is_read(store, entry.key)
    store.close()
    assert ["format 1 of an earlier version; the marker is" in one for one in caplog.messages] == [True]


@pytest.mark.parametrize("others", [[], ["thesis.txt"]])
def test_an_earlier_format_costs_no_start(directory, others):
    """DC-2: without a slot, and beside files of others, too."""
    directory.mkdir()
    for name in others:
        (directory / name).touch()
    (directory / MARKER).write_text("megatron_ext prefix cache, format 6\n")
    with pytest.raises(ConfigError, match="has the format 6 of an earlier version; `erase` removes"):
        take_all_slots(directory)
    take_slot(directory).close()
    assert sorted(os.listdir(directory)) == sorted([MARKER, "slot-0", *others])
    assert (directory / MARKER).read_text().endswith("format 7\n")


def kept_entry(directory: Path) -> NewEntry:
    """An entry that a process has left in a directory."""
    store, entry = open_directory_store(directory, IDENTITY, LIMIT), entry_after(None, [1])
    put(store, entry)
    store.close()
    return entry


NAMES = ["slot-0", "slot-0/lock", MARKER, "entry"]


def path_of(directory: Path, name: str) -> Path:
    """A path in a directory that has an entry."""
    entry = kept_entry(directory)
    return file_of(directory, entry.key) if name == "entry" else directory / name


@pytest.mark.parametrize("name", NAMES)
def test_links_are_not_followed(directory, tmp_path, name):
    """DC-4."""
    path = path_of(directory, name)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises((ConfigError, DiskUnavailableError), match=r"symbolic links|Not a directory|not a regular file"):
        open_directory_store(directory, IDENTITY, LIMIT)


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_second_name_of_a_file_is_refused(directory, tmp_path, name):
    """DC-4."""
    os.link(path_of(directory, name), tmp_path / "second")
    with pytest.raises(ConfigError, match="is not a regular file with one name"):
        open_directory_store(directory, IDENTITY, LIMIT)


@pytest.mark.parametrize("name", ["", *NAMES])
def test_what_others_can_write_to_is_refused(directory, name):
    """DC-4."""
    path_of(directory, name).chmod(0o777)
    with pytest.raises(ConfigError, match="0777"):
        open_directory_store(directory, IDENTITY, LIMIT)


@pytest.mark.parametrize("name", ["", *NAMES[:3]])
def test_files_of_another_user_are_refused(directory, monkeypatch, name):
    """DC-4."""
    ForeignFiles(monkeypatch).add(path_of(directory, name))
    with pytest.raises(ConfigError, match="uid 65534"):
        open_directory_store(directory, IDENTITY, LIMIT)


def test_files_are_this_users_alone(directory):
    """DC-4."""
    kept_entry(directory)
    modes = {path.name: path.stat().st_mode & 0o777 for path in [directory, *directory.rglob("*")]}
    assert (modes.pop("cache"), modes.pop("slot-0")) == (0o700, 0o700)
    assert (len(modes), set(modes.values())) == (3, {0o600})


def test_a_directory_that_cannot_be_written_is_said_in_one_line():
    """DC-3."""
    with fast_directory() as folder:
        directory = Path(folder) / "cache"
        open_directory_store(directory, IDENTITY, LIMIT).close()
        if os.geteuid() == 0:
            for path in (Path(folder), directory, *directory.rglob("*")):
                os.chown(path, 65534, -1)
        (directory / "slot-0" / "lock").chmod(0o400)
        try:
            os.seteuid(65534 if os.geteuid() == 0 else os.geteuid())
            with pytest.raises(DiskUnavailableError, match="cache: Permission denied"):
                open_directory_store(directory, IDENTITY, LIMIT)
        finally:
            os.seteuid(os.getuid())


def test_a_network_file_system_is_refused_by_name(directory, tmp_path, monkeypatch):
    """DC-3."""
    table = tmp_path / "mountinfo"
    with table.open("w") as file:
        mount = re.search(r"mnt_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{file.fileno()}").read_text())[1]
        file.write(f"{mount}0 0 0:1 / / rw - cifs a rw\n{mount} 1 0:2 / /any rw shared:1 - nfs4 host:/b rw\n")
    monkeypatch.setattr(slots, "MOUNT_TABLE", table)
    with pytest.raises(DiskUnavailableError, match=f"{directory} is on a network file system .nfs4.; name a local one"):
        take_slot(directory)
    assert not os.listdir(directory)
