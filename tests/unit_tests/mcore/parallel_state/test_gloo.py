"""OB-4: a process group costs a thread where there is one rank, and no device of its own anywhere."""

from __future__ import annotations

import os

import torch
import torch.distributed

from megatron_ext.mcore import platform
from megatron_ext.mcore.platform import sharing_one_device
from tests.forked import fork

GROUPS = 5


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def made() -> tuple[list, int]:
    """Make some groups and count the threads that they start."""
    before = threads()
    groups = [torch.distributed.new_group([0], backend="gloo") for _ in range(GROUPS)]
    return groups, threads() - before


def count_threads_of_groups() -> None:
    """Steps of a process that has no other threads, which could end in between."""
    platform.initialize()
    plain, each = made()
    with sharing_one_device(1):
        sharing, fewer = made()
    after, again = made()
    assert fewer <= GROUPS + 1
    assert each == again >= 2 * GROUPS, "the control: what torch does by itself, before and after"
    for group in (*plain, *sharing, *after):
        tensor = torch.tensor([3.0])
        torch.distributed.all_reduce(tensor, group=group)
        torch.distributed.barrier(group)
        assert tensor.item() == 3
        torch.distributed.destroy_process_group(group)


def test_threads_of_groups():
    process = fork(count_threads_of_groups)
    process.join()
    assert process.exitcode == 0
