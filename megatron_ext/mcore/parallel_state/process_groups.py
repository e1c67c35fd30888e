"""torch.distributed and Megatron's groups for in-process engines: reused if initialized, else created and destroyed."""

from __future__ import annotations

import dataclasses
import threading

import torch
from megatron.core import parallel_state

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.parallel.failure import sign_in
from megatron_ext.parallel.layout import check_world
from megatron_ext.parallel.parallel_context import ParallelContext, RankInfo


class ProcessGroups:
    """Process groups shared by the engines of one process; groups older than the first engine are left alone.

    A `ConfigError` says that existing groups contradict an engine's settings.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._engines = 0
        self._owns_distributed = False
        self._owns_groups = False

    def enter(self, parallel: ParallelConfig) -> None:
        """Register an engine and create the groups that do not exist."""
        with self._changing:
            has_distributed = torch.distributed.is_initialized()
            has_groups = parallel_state.model_parallel_is_initialized()
            if has_distributed:
                _check_distributed(parallel)
            if has_groups:
                platform.group_sizes(parallel)
            platform.initialize(parallel)
            self._owns_distributed |= not has_distributed
            self._owns_groups |= not has_groups
            self._engines += 1

    def join(self, parallel: ParallelConfig) -> None:
        """Register an engine of a model that is in memory in the existing groups; nothing is created."""
        with self._changing:
            _check_distributed(parallel)
            platform.group_sizes(parallel)
            sign_in()
            self._engines += 1

    def leave(self) -> None:
        """Unregister an engine; after the last one, destroy the groups that the first one created."""
        with self._changing:
            self._engines -= 1
            if self._engines:
                return
            if self._owns_groups and parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
            if self._owns_distributed and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            self._owns_distributed = self._owns_groups = False


PROCESS_GROUPS = ProcessGroups()


def existing_sizes(parallel: ParallelConfig) -> ParallelConfig:
    """Return settings with the sizes of Megatron's existing groups; sizes other than 1 are left to `join` to check.

    Raises:
        ConfigError: There are no groups.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "Megatron's process groups do not exist; call parallel_state.initialize_model_parallel before the model is "
            "built"
        )
    found, plain = platform.group_sizes(), ParallelConfig()
    names = [one.name for one in dataclasses.fields(plain)]
    missing = [name for name in names if getattr(parallel, name) == getattr(plain, name)]
    return dataclasses.replace(parallel, **{name: getattr(found, name) for name in missing})


def _check_distributed(parallel: ParallelConfig) -> None:
    existing, asked = torch.distributed.get_backend(), parallel.distributed_backend
    if asked is not None and asked not in existing and (asked != "nccl" or torch.cuda.is_available()):
        raise ConfigError(
            f"distributed_backend {asked} contradicts torch.distributed, which is initialized with {existing}; "
            "leave it out"
        )
    check_world(parallel, torch.distributed.get_world_size())


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
