"""Opening of the store: slot, data file, index; a damaged index is replaced."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk.data_file import PAGE_BYTES, DataFile
from megatron_ext.prefix_cache.disk.index import DiskIndex, NewerFormatError
from megatron_ext.prefix_cache.disk.slot import (
    DATA,
    INDEX,
    DiskUnavailableError,
    SlotDirectory,
    failure_reason,
    newer_format,
    take_slot,
)
from megatron_ext.prefix_cache.disk.store import DiskStore
from megatron_ext.prefix_cache.disk.store_use import BAD_INDEX
from megatron_ext.trusted_path import UntrustedPathError

logger = logging.getLogger(__name__)


def open_directory_store(directory: Path, identity: bytes, limit_bytes: int) -> DiskStore:
    """Take a slot of a directory and open the store in it.

    Args:
        directory: The directory, created if missing.
        identity: See `DiskStore`, also for the next one.
        limit_bytes: Budget of the data file.

    Raises:
        ConfigError: The directory is not for this, or other users can write to it; see `take_slot`.
        DiskUnavailableError: The directory cannot be used now.
    """
    slot = take_slot(directory)
    try:
        return open_store(slot, identity, limit_bytes)
    except BaseException:
        slot.close()
        raise


def open_store(slot: SlotDirectory, identity: bytes, limit_bytes: int) -> DiskStore:
    """Open the store in a slot; a damaged index is replaced by an empty one, which is said once.

    Raises:
        ConfigError: The index has a newer format, or a file may have been written by another user.
        DiskUnavailableError: The slot's files cannot be read or written now.
    """
    try:
        data = DataFile(slot.open_file(DATA), limit_bytes // PAGE_BYTES)
        try:
            try:
                return _with_index(slot, data, identity, limit_bytes)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                logger.warning(
                    "prefix cache on disk: %s: the index cannot be used (%s); it begins empty", slot.path, error
                )
                slot.remove_index()
                data.clear()
                store = _with_index(slot, data, identity, limit_bytes)
                store.drops[BAD_INDEX] += 1
                return store
        except BaseException:
            data.close()
            raise
    except NewerFormatError as error:
        raise newer_format(f"{slot.path}/{INDEX}", str(error)) from None
    except UntrustedPathError as error:
        raise ConfigError(str(error)) from None
    except (OSError, sqlite3.Error) as error:
        raise DiskUnavailableError(f"{slot.path}: {failure_reason(error)}") from None


def _with_index(slot: SlotDirectory, data: DataFile, identity: bytes, limit_bytes: int) -> DiskStore:
    slot.open_index()
    index = DiskIndex(slot.path / INDEX, may_be_new=not data.size)
    try:
        return DiskStore(slot, index, data, identity, limit_bytes)
    except BaseException:
        index.close()
        raise
