"""World from the environment: rank and size of this process, as `torchrun` and its like set `RANK` and `WORLD_SIZE`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.errors import ConfigError, MachineError


@dataclass(frozen=True)
class World:
    """Rank of this process and number of ranks.

    Attributes:
        rank: Rank of this process, from 0.
        size: Number of ranks of the world.
        is_launched: Whether a launcher started the processes together; a world of one if not.
    """

    rank: int = 0
    size: int = 1
    is_launched: bool = False


def world_of_environment(environment: Mapping[str, str] = os.environ) -> World:
    """Return the world that the environment describes.

    Raises:
        ConfigError: The variables are not valid numbers.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return World()
    rank, size = (environment.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(
            f"the environment says RANK={rank!r} and WORLD_SIZE={size!r}; a rank is a number from 0 on, below the size"
        )
    return World(int(rank), int(size), is_launched="RANK" in environment)


def environments_of_ranks(nodes: Sequence[str], address: str, port: int) -> list[dict[str, str]]:
    """Return the environment of each rank of a world without torchrun, whose store already listens; as torchrun's.

    Args:
        nodes: Name of each rank's node, in the order of ranks.
        address: Address of the store.
        port: Port of the store.
    """
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank starts a store
        }
        for rank, node in enumerate(nodes)
    ]


def ranks_on_this_machine(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that share this machine's memory, by the environment; 1 if it is not set."""
    value = environment.get("LOCAL_WORLD_SIZE", "1")
    return int(value) if value.isdecimal() and int(value) > 0 else 1


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this rank reports for all ranks: True unless the environment gives it another rank than 0."""
    return environment.get("RANK", "0") in ("", "0")


def message_of_this_rank(error: ConfigError, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return this rank's message for an error that ends it before the ranks have met; None if another rank reports it.

    Most mistakes are the same on all ranks, and the first rank reports them. An error of one machine is reported by its
    first rank, or by each of its ranks if the environment does not number them.
    """
    if is_first_rank(environment):
        return str(error)
    if not isinstance(error, MachineError) or environment.get("LOCAL_RANK", "0") != "0":
        return None
    return f"rank {environment['RANK']}: {error}"
