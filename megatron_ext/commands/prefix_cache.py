"""Command `prefix-cache`: list, verify or erase entries that processes have left in a directory.

The directory is one of `--prefix-cache-dir`. A slot that a process holds is not touched: it is named at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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

MAX_LISTED = 1000


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
                result = (list_prefixes if arguments.action == "list" else verify)(stores)
    except (ConfigError, DiskUnavailableError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return BAD_USAGE
    for slot in held:
        print(f"{program}: error: {slot}; {REMEDY}", file=sys.stderr)
    return BAD_USAGE if held else result


def list_prefixes(stores: dict[str, DiskStore]) -> int:
    """Print the prefixes of each slot, those last used first."""
    for name, store in stores.items():
        entries = store.all_entries()
        prefixes = prefixes_of(entries)
        size = sum(entry.size for entry in entries)
        print(f"{name}: {len(prefixes)} prefixes, {len(entries)} entries, {size / MIB:.1f} MiB")
        if prefixes:
            print("  model     prefix      tokens  blocks  snapshots       MiB     used")
        for one in prefixes[:MAX_LISTED]:
            age = max(0.0, time.time() - one.used)
            print(
                f"  {one.identity[:8]}  {one.end[:8]}  {one.tokens:8}  {one.blocks:6}  {one.snapshots:9}"
                f"  {one.size / MIB:8.1f}  {describe_age(age)} ago"
            )
        if len(prefixes) > MAX_LISTED:
            print(f"  and {len(prefixes) - MAX_LISTED} more")
    return DONE


def describe_age(seconds: float) -> str:
    """Return a time in its largest unit, rounded down."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


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


@dataclass(frozen=True)
class Prefix:
    """Stored prefix: the last block or snapshot of a sequence, and all blocks before it.

    Attributes:
        identity: Identity of the model and its settings, in hex.
        end: Hash of its last block, in hex.
        blocks: Number of blocks that are stored of it; fewer than its length has if some were evicted.
        size: Bytes of blocks and snapshots; entries that several prefixes share count for each prefix.
        used: Time of its last use, seconds since the epoch.
    """

    identity: str
    end: str
    tokens: int
    blocks: int
    snapshots: int
    size: int
    used: float


def prefixes_of(entries: Sequence[StoredEntry]) -> list[Prefix]:
    """Return the prefixes that no other entry continues, the most recently used first."""
    by_end: dict[tuple[bytes, bytes], list[StoredEntry]] = {}
    for entry in entries:
        by_end.setdefault((entry.identity, entry.key.block_hash), []).append(entry)
    continued = {(entry.identity, entry.parent) for entry in entries}
    found = []
    for identity, end in by_end.keys() - continued:
        chain: list[StoredEntry] = []
        here = end
        seen: set[bytes] = set()
        while (identity, here) in by_end and here not in seen:  # files of damaged names may form a circle
            seen.add(here)
            chain += by_end[identity, here]
            here = by_end[identity, here][0].parent
        last = by_end[identity, end][0]
        blocks = sum(one.key.kind is EntryKind.BLOCK for one in chain)
        found.append(
            Prefix(
                identity.hex(),
                end.hex(),
                last.depth * last.token_count,
                blocks,
                len(chain) - blocks,
                sum(one.size for one in chain),
                max(one.used for one in chain),
            )
        )
    return sorted(found, key=lambda prefix: (prefix.used, prefix.end), reverse=True)
