"""Description of a replica for routers: the shape of its caches, its tag, and its load. Needs neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from megatron_ext.routing.scaling import ReplicaLoad


@dataclass(frozen=True)
class ReplicaFacts:
    """Facts of a replica that do not change while its process lives.

    Attributes:
        block_size: Tokens of a block.
        blocks: Blocks of each cache's pool.
        has_states: Whether requests resume only at snapshots.
        caches: Number of caches: data-parallel ranks of the replica's world.
        tag: Tag of the replica in the ids of responses.
    """

    block_size: int
    blocks: int
    has_states: bool
    caches: int = 1
    tag: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the facts as JSON."""
        return asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, object]) -> ReplicaFacts:
        """Return the facts that `to_dict` gave.

        Raises:
            ValueError: A field is missing or has another type: the replica has another version of this package.
        """
        try:
            facts = cls(**content)  # type: ignore[arg-type]  # checked next
        except TypeError as error:
            raise ValueError(f"facts of a replica of another version: {error}") from None
        if any(type(one) is not int or one < 1 for one in (facts.block_size, facts.blocks, facts.caches)):
            raise ValueError(f"facts of a replica of another version: {content}")
        return facts


@dataclass(frozen=True)
class LoadReport:
    """Load of a replica, as a router asks for it.

    Attributes:
        load: Load by all requests; without the replica's name.
        others: Load by the requests that other routers sent; see `RequestManager.load_of_others`.
    """

    load: ReplicaLoad
    others: tuple[int, int, int]
