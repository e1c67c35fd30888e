"""Whether this machine is what the settings speak of."""

from __future__ import annotations

import sys

from megatron_ext.config import ParallelConfig
from megatron_ext.ranks.layout import Layout, plan_layout
from megatron_ext.ranks.world import world_of_environment


def check_machine(parallel: ParallelConfig) -> Layout:
    """See that the processes are there that the settings speak of.

    Returns:
        How they share the model.

    Raises:
        ConfigError: They are not.
    """
    world = world_of_environment()
    return plan_layout(parallel, world.size, is_launched=world.is_launched, program=sys.argv[0])
