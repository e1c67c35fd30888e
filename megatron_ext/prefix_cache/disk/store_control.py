"""Commands that tools give to the process whose store is in use: list its entries, or erase them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_ext.prefix_cache.disk.control import Answer, SlotControl
from megatron_ext.prefix_cache.disk.listing import Listing
from megatron_ext.prefix_cache.disk.store import DiskStore

logger = logging.getLogger(__name__)

LIST, ERASE = "list", "erase"


def _nothing() -> None:
    """Forget nothing: no entry waits to be written."""


def control_of(
    store: DiskStore, run: Callable[[Callable[[], Answer]], Answer], forget_waiting: Callable[[], None] = _nothing
) -> SlotControl | None:
    """Answer commands of tools about a store from now on; None, which is said, if its directory cannot have a socket.

    Args:
        store: The store; the control is closed before it.
        run: Calls a function while nothing else uses the store, and returns its result.
        forget_waiting: Forgets entries that wait to be written; called by the function.
    """

    def erase() -> Answer:
        forget_waiting()
        count = store.empty()
        logger.warning("prefix cache on disk: %s: a command erased %d entries", store.slot.path, count)
        return {"entries": count}

    commands = {
        LIST: lambda: run(lambda: Listing.of(store.all_entries()).to_answer()),
        ERASE: lambda: run(erase),
    }
    try:
        return SlotControl(store.slot, commands)
    except OSError as error:
        logger.warning(
            "prefix cache on disk: %s: tools cannot list or erase it while this process runs: %s",
            store.slot.path,
            error.strerror,
        )
        return None
