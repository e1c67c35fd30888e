"""Command `prefix-cache`: list, verify or erase entries that processes have left in a directory.

The directory is one of `--prefix-cache-dir`. A slot that a process holds is listed and erased by that process; without
its answer, and for `verify`, the slot is refused by name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk.control import ANSWER_SECONDS, NoAnswerError, ask_holder
from megatron_ext.prefix_cache.disk.listing import Listing
from megatron_ext.prefix_cache.disk.opening import open_store
from megatron_ext.prefix_cache.disk.slot import DATA, DiskUnavailableError, HeldSlot, take_all_slots
from megatron_ext.prefix_cache.disk.store import DiskStore
from megatron_ext.prefix_cache.disk.store_control import ERASE, LIST

PROGRAM = "megatron-ext prefix-cache"
DONE, FOUND_DAMAGE, BAD_USAGE = 0, 1, 2
NO_IDENTITY = bytes(32)  # of no model: all entries are those of others
MIB = 1024**2


def main(argv: Sequence[str] | None = None, *, program: str = PROGRAM) -> int:
    """Do what is asked with a directory.

    Returns:
        Exit code: 0 done, 1 damaged entries were found and dropped, 2 bad usage.
    """
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("action", choices=("list", "verify", "erase"))
    arguments = parser.parse_args(argv)
    try:
        with ExitStack() as opened:
            stores, held = open_stores(arguments.directory, opened)
            if arguments.action == "erase":
                return erase(stores, held, program)
            return verify(stores, held) if arguments.action == "verify" else list_prefixes(stores, held)
    except (ConfigError, DiskUnavailableError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return BAD_USAGE


def open_stores(directory: Path, opened: ExitStack) -> tuple[dict[str, DiskStore], list[HeldSlot]]:
    """Open the stores of all free slots, by the names of the slots; they are closed with `opened`.

    Returns:
        The stores, and the slots that processes hold.

    Raises:
        ConfigError: The directory is not one of a prefix cache.
        DiskUnavailableError: The directory cannot be read or written.
    """
    slots, held = take_all_slots(directory)
    for one in held:
        opened.callback(one.close)
    with ExitStack() as unopened:
        for slot in slots:
            unopened.callback(slot.close)
        stores = {}
        for slot in slots:
            size = (slot.path / DATA).stat().st_size if (slot.path / DATA).exists() else 0
            stores[slot.path.name] = open_store(slot, NO_IDENTITY, size)
        unopened.pop_all()
    for store in stores.values():
        opened.callback(store.close)
    return stores, held


def ask(slot: HeldSlot, command: str) -> dict[str, object]:
    """Return the answer of the process that holds a slot.

    Raises:
        ConfigError: It does not answer. The message names the slot and the process.
    """
    try:
        return ask_holder(slot.handle, command, ANSWER_SECONDS)
    except NoAnswerError as error:
        raise ConfigError(f"{slot.error}, and {error}") from None


def ask_listing(slot: HeldSlot) -> Listing:
    """Return the listing by the process that holds a slot.

    Raises:
        ConfigError: It does not answer, or as another version does. The message names the slot and the process.
    """
    try:
        return Listing.from_answer(ask(slot, LIST))
    except TypeError as error:
        raise ConfigError(f"{slot.error}, and its answer is not understood ({error})") from None


def list_prefixes(stores: dict[str, DiskStore], held: Sequence[HeldSlot]) -> int:
    """Print the prefixes of each slot, those last used first; holders of slots list their own."""
    listings = [(name, Listing.of(store.all_entries())) for name, store in stores.items()]
    listings += [(slot.name, ask_listing(slot)) for slot in held]
    for name, found in listings:
        print(f"{name}: {found.prefixes} prefixes, {found.entries} entries, {found.size / MIB:.1f} MiB")
        if found.listed:
            print("  model     prefix      tokens  blocks  snapshots       MiB     used")
        for one in found.listed:
            age = max(0.0, time.time() - one.used)
            print(
                f"  {one.identity[:8]}  {one.end[:8]}  {one.tokens:8}  {one.blocks:6}  {one.snapshots:9}"
                f"  {one.size / MIB:8.1f}  {describe_age(age)} ago"
            )
        if found.prefixes > len(found.listed):
            print(f"  and {found.prefixes - len(found.listed)} more")
    return DONE


def describe_age(seconds: float) -> str:
    """Return a time in its largest unit, rounded down."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def verify(stores: dict[str, DiskStore], held: Sequence[HeldSlot]) -> int:
    """Read every entry; those that are damaged are dropped and counted.

    Raises:
        SlotHeldError: A process holds a slot; nothing is read.
        DiskUnavailableError: The files cannot be read.
    """
    if held:
        raise held[0].error
    damaged = 0
    for name, store in stores.items():
        sound = store.verify()
        dropped = dict(sorted(store.drops.items()))
        damaged += sum(dropped.values())
        print(f"{name}: {sound} entries are sound, dropped: {dropped or 'none'}")
        if not store.use.is_on:
            raise DiskUnavailableError(f"{name}: {store.problem}")
    return FOUND_DAMAGE if damaged else DONE


def erase(stores: dict[str, DiskStore], held: Sequence[HeldSlot], program: str = PROGRAM) -> int:
    """Remove the files of every free slot, and make holders of the others forget their entries on disk.

    Marker, locks and directories stay. A slot whose holder does not answer is named at the end, after all others.
    """
    for name, store in stores.items():
        count = len(store.all_entries())
        store.erase()
        print(f"{name}: {count} entries erased")
    refused = []
    for slot in held:
        try:
            print(f"{slot.name}: {ask(slot, ERASE)['entries']} entries erased by the process that holds it")
        except ConfigError as error:
            refused.append(error)
    for refusal in refused:
        print(f"{program}: error: {refusal}", file=sys.stderr)
    return BAD_USAGE if refused else DONE
