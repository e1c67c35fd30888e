"""Gloo process groups that share one network device.

torch gives each group its own device, with one thread that polls sockets and two that run collectives. megatron-core
makes some twenty groups, so a rank had sixty idle threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import Store, distributed_c10d


@contextlib.contextmanager
def sharing_one_device(threads: int) -> Iterator[None]:
    """Create gloo groups on one shared device inside this context.

    Args:
        threads: Threads per group that run its collectives. With one thread they run in the order of their launch.
    """
    if not distributed_c10d.is_gloo_available():
        yield
        return
    plain = distributed_c10d.ProcessGroupGloo
    options_of = plain._Options  # type: ignore[attr-defined]  # torch's own description of the class lacks it
    device = plain.create_default_device()

    class SharingGroup(plain):  # type: ignore[misc,valid-type]  # torch calls `isinstance` with the replaced name
        """Gloo group on the shared device."""

        def __init__(
            self, store: Store, rank: int, size: int, timeout: timedelta = distributed_c10d.default_pg_timeout
        ) -> None:
            options = options_of()
            options._devices, options._threads, options._timeout = [device], threads, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharingGroup  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = plain  # type: ignore[misc]
