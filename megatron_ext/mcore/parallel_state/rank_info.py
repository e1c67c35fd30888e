"""Parallel context of the ranks, as Megatron's parallel state numbers them."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from megatron_ext.config import ParallelConfig
from megatron_ext.parallel.parallel_context import ParallelContext, RankInfo


def make_parallel_context(parallel: ParallelConfig) -> ParallelContext | None:
    """Return the context of all ranks, after `platform.initialize`; None for a world of one, which needs none.

    Args:
        parallel: Communication settings of the ranks.
    """
    if torch.distributed.get_world_size() == 1:
        return None
    tensor = parallel_state.get_tensor_model_parallel_rank()
    is_last = parallel_state.is_pipeline_last_stage()
    here = RankInfo(
        rank=torch.distributed.get_rank(),
        tensor=tensor,
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        replica=parallel_state.get_data_parallel_rank(),
        samples=is_last and tensor == 0,
    )
    return ParallelContext(here, parallel)
