"""What the environment says of this process among others: `torchrun` and its like set `RANK` and `WORLD_SIZE`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ext.errors import ConfigError, MachineError


@dataclass(frozen=True)
class World:
    """This process's number and how many there are.

    Attributes:
        rank: From 0.
        size: Of the whole world.
        is_launched: Whether something started the processes together; if nothing did, this is a world of one.
    """

    rank: int = 0
    size: int = 1
    is_launched: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: to the terminal, to files, to clients."""
        return self.rank == 0


def world_of_environment(environment: Mapping[str, str] | None = None) -> World:
    """The world that the environment describes.

    Args:
        environment: Variables; None for the process's own.

    Raises:
        ConfigError: They are not numbers that make sense.
    """
    variables = os.environ if environment is None else environment
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return World()
    rank, size = (variables.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(
            f"the environment says RANK={rank!r} and WORLD_SIZE={size!r}; a rank is a number from 0 on, below the size"
        )
    return World(int(rank), int(size), is_launched="RANK" in variables)


def ranks_on_this_machine(environment: Mapping[str, str] | None = None) -> int:
    """How many ranks share this machine's memory, as far as the environment says; 1 if it says nothing."""
    variables = os.environ if environment is None else environment
    said = variables.get("LOCAL_WORLD_SIZE", "1")
    return int(said) if said.isdecimal() and int(said) > 0 else 1


def is_first_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether what every rank has to say alike is for this one to say: yes unless the environment says otherwise."""
    variables = os.environ if environment is None else environment
    return variables.get("RANK", "0") in ("", "0")


def said_here(error: ConfigError, environment: Mapping[str, str] | None = None) -> str | None:
    """What this rank says of a mistake that ends it before the ranks have met; None if another rank says it.

    Most mistakes are seen alike by all, and the first rank says them. What only one machine may see its first rank
    says, or each of its ranks where the environment does not tell which one that is.
    """
    variables = os.environ if environment is None else environment
    if is_first_rank(variables):
        return str(error)
    if not isinstance(error, MachineError) or variables.get("LOCAL_RANK", "0") != "0":
        return None
    return f"rank {variables['RANK']}: {error}"
