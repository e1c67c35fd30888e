"""What a run says, and sets, before anything else."""

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
    """See that the processes are there that the settings speak of; say it where ranks talk otherwise than was asked.

    Returns:
        How they share the model.

    Raises:
        ConfigError: They are not.
    """
    world = world_of_environment()
    if parallel.distributed_backend == "nccl" and not torch.cuda.is_available() and world.is_first:
        logger.warning("--distributed-backend nccl needs CUDA, which this machine does not have; gloo it is")
    return plan_layout(parallel, world.size, is_launched=world.is_launched, program=sys.argv[0])


logger = logging.getLogger(__name__)


def say_start(start: StartNotes) -> None:
    """Say what was accepted and has no effect; of several ranks the first one says it."""
    if os.environ.get("RANK", "0") in ("", "0"):
        for line in start.lines:
            logger.warning("%s", line)
