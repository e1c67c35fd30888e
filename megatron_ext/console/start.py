"""Start of a run: checks, settings and messages before anything is loaded."""

from __future__ import annotations

import logging
import os
import sys

import torch

from megatron_ext.config import ParallelConfig, StartNotes
from megatron_ext.parallel.layout import Layout, plan_layout
from megatron_ext.parallel.world import world_of_environment

logger = logging.getLogger(__name__)


def check_machine(parallel: ParallelConfig) -> Layout:
    """Check that the processes match the settings; log if ranks communicate over another backend than requested.

    Returns:
        Layout of the model over the ranks.

    Raises:
        ConfigError: The processes do not match.
    """
    world = world_of_environment()
    if parallel.distributed_backend == "nccl" and not torch.cuda.is_available() and world.is_first:
        logger.warning("--distributed-backend nccl needs CUDA, which this machine does not have; gloo it is")
    return plan_layout(parallel, world.size, is_launched=world.is_launched, program=sys.argv[0])


logger = logging.getLogger(__name__)


def say_start(start: StartNotes) -> None:
    """Log the accepted flags that have no effect; with several ranks, only on the first one."""
    if os.environ.get("RANK", "0") in ("", "0"):
        for line in start.lines:
            logger.warning("%s", line)
