"""Load of a replica, as routers ask for it. Needs neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.routing.scaling import ReplicaLoad


@dataclass(frozen=True)
class LoadReport:
    """Load of a replica, as a router asks for it.

    Attributes:
        load: Load by all requests; without the replica's name.
        others: Load by the requests that other routers sent; see `RequestManager.load_of_others`.
    """

    load: ReplicaLoad
    others: tuple[int, int, int]
