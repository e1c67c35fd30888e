"""Description of a replica for routers: the shape of its caches, and its tag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


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
