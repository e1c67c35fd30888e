"""Command `prefix-cache`: list, verify or erase entries that processes have left in a directory.

The directory is one of `--prefix-cache-dir`. A slot that a process holds is not touched: it is named at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk.entry import EntryKind, StoredEntry
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.prefix_cache.disk.slot import DiskUnavailableError, SlotDirectory, failure_reason, take_all_slots
from megatron_ext.prefix_cache.disk.store import DiskStore, open_store
from megatron_ext.trusted_path import UntrustedPathError

PROGRAM = "megatron-ext prefix-cache"
DONE, FOUND_DAMAGE, BAD_USAGE = 0, 1, 2
NO_IDENTITY = bytes(32)  # of no model: all entries belong to other identities
NO_LIMIT = 2**62  # bytes
MIB = 1024**2
REMEDY = "stop it first; `POST /reset_prefix_cache` of a running server erases its entries on disk"


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """List, verify or erase the entries in a directory.

    Returns:
        Exit code: 0 done, 1 damaged entries were found and dropped, 2 bad usage.
    """
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("action", choices=("list", "verify", "erase"))
    arguments = parser.parse_args(argv)
    try:
        with ExitStack() as opened:
            slots, held = take_all_slots(arguments.directory, erases=arguments.action == "erase")
            for taken in slots:
                opened.callback(taken.close)
            if arguments.action == "erase":
                result = erase(slots)
            else:
                stores = {slot.path.name: open_store(slot, NO_IDENTITY, NO_LIMIT) for slot in slots}
                result = (list_entries if arguments.action == "list" else verify)(stores)
    except (ConfigError, DiskUnavailableError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return BAD_USAGE
    for slot in held:
        print(f"{program}: error: {slot}; {REMEDY}", file=sys.stderr)
    return BAD_USAGE if held else result


def list_entries(stores: dict[str, DiskStore]) -> int:
    """Print the entries of each slot, by model: their numbers, their size and their last use."""
    for name, store in stores.items():
        models: defaultdict[bytes, list[StoredEntry]] = defaultdict(list)
        for entry in store.all_entries():
            models[entry.identity].append(entry)
        print(f"{name}: {sum(map(len, models.values()))} entries of {len(models)} models")
        for identity, entries in models.items():
            blocks = sum(one.key.kind is EntryKind.BLOCK for one in entries)
            size = sum(one.size for one in entries) / MIB
            hours = max(0.0, time.time() - max(one.used for one in entries)) / 3600
            print(
                f"  {identity.hex()[:8]}: {blocks} blocks, {len(entries) - blocks} snapshots, {size:.1f} MiB, "
                f"used {hours:.1f} h ago"
            )
    return DONE


def verify(stores: dict[str, DiskStore]) -> int:
    """Read every entry; drop and count damaged ones.

    Raises:
        DiskUnavailableError: The files cannot be read.
    """
    damaged = 0
    for name, store in stores.items():
        sound = store.verify()
        dropped = dict(sorted(store.drops.items()))
        damaged += sum(dropped.values())
        print(f"{name}: {sound} entries are sound, dropped: {dropped or 'none'}")
        if not store.use.is_on:
            raise DiskUnavailableError(f"{name}: {store.problem}")
    return FOUND_DAMAGE if damaged else DONE


def erase(slots: Sequence[SlotDirectory]) -> int:
    """Remove the files of every slot; marker, locks and directories stay."""
    result = DONE
    for slot in slots:
        try:
            print(f"{slot.path.name}: {EntryFiles(slot.handle).erase()} entries erased")
        except (OSError, UntrustedPathError) as error:
            print(f"{PROGRAM}: error: {failure_reason(error)}; all other entries were erased", file=sys.stderr)
            result = BAD_USAGE
    return result
