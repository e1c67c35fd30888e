"""Description of a replica for routers: whose requests it can serve, and the shape of its caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Group:
    """Replicas with an equal group can answer for each other, as in a coordinator's fleet.

    Attributes:
        model: Name that the model is served under.
        configuration: Hash of the model configuration and the type of the parameters.
        tokenizer: Hash of the tokenizer and its chat template.
    """

    model: str
    configuration: str
    tokenizer: str


@dataclass(frozen=True)
class ReplicaFacts:
    """Facts of a replica that do not change while its process lives.

    Attributes:
        group: Group of the replica.
        block_size: Tokens of a block.
        blocks: Blocks of each cache's pool.
        has_states: Whether requests resume only at snapshots.
        caches: Number of caches: data-parallel ranks of the replica's world.
        has_keys: Whether the replica binds salts to API keys.
        tag: Tag of the replica in the ids of responses.
    """

    group: Group
    block_size: int
    blocks: int
    has_states: bool
    caches: int = 1
    has_keys: bool = False
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
        fields = dict(content)
        group = fields.pop("group", None)
        try:
            facts = cls(group=Group(**group), **fields)  # type: ignore[arg-type]  # checked next
        except TypeError as error:
            raise ValueError(f"facts of a replica of another version: {error}") from None
        numbers = (facts.block_size, facts.blocks, facts.caches)
        if any(type(one) is not int or one < 1 for one in numbers) or not all(
            isinstance(one, str) for one in vars(facts.group).values()
        ):
            raise ValueError(f"facts of a replica of another version: {content}")
        return facts
