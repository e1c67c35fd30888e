"""Tensor-parallel layouts in one process: each rank's modules are built one after the other, and none is ever run.

One state dict may hold the shards of all ranks, so that a checkpoint is written or read as by all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.mcore import platform


@dataclass(frozen=True)
class Group:
    """Process group, reduced to the methods that modules use when they are built or describe their shards."""

    ranks: int
    index: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.index


@contextlib.contextmanager
def as_rank(index: int, ranks: int) -> Iterator[ProcessGroupCollection]:
    """Build modules, or describe their shards, as rank `index` of `ranks` tensor-parallel ranks within the context."""
    platform.initialize()
    groups, group = ProcessGroupCollection.use_mpu_process_groups(), Group(ranks, index)
    groups.tp = group
    with contextlib.ExitStack() as stack:
        for owner, name, answer in (
            (ProcessGroupCollection, "use_mpu_process_groups", groups),
            (parallel_state, "get_tensor_model_parallel_group", group),
            (parallel_state, "get_tensor_model_parallel_rank", index),
            (parallel_state, "get_tensor_model_parallel_world_size", ranks),
        ):
            stack.enter_context(mock.patch.object(owner, name, return_value=answer))
        yield groups
