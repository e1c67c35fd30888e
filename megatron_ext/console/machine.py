"""Whether this machine is what the settings speak of."""

from __future__ import annotations

import os

import torch

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError


def check_machine(parallel: ParallelConfig) -> None:
    """See that the processes and the device are there that the settings speak of.

    Raises:
        ConfigError: They are not.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise ConfigError(f"started on {ranks} ranks, and this version runs on one; give torchrun --nproc-per-node 1")
    if parallel.distributed_backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--distributed-backend nccl needs CUDA, which this machine does not have; gloo would do")
