"""EX-7: the CPU stand-ins are there only where CUDA is not; initialising twice is initialising once."""

from __future__ import annotations

import sys

import pytest
import torch
from megatron.core import parallel_state

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from tests.forked import fork

REPLACED = (
    (torch.cuda, "current_device"),
    (torch.cuda, "Event"),
    (torch.cuda, "Stream"),
    (torch.cuda, "current_stream"),
    (torch.cuda, "stream"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "memory_stats"),
    (torch.cuda.nvtx, "range_push"),
    (torch.cuda.nvtx, "range_pop"),
)


@pytest.fixture
def originals(monkeypatch) -> dict[str, object]:
    """Something recognisable in the place of every CUDA call; put back afterwards."""
    marks = {name: object() for _, name in REPLACED}
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, marks[name])
    return marks


def test_nothing_is_replaced_where_cuda_is(originals, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    platform.install_cpu_stand_ins()
    assert {name: getattr(owner, name) for owner, name in REPLACED} == originals


def test_everything_is_replaced_where_cuda_is_not(originals, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for _ in range(2):
        platform.install_cpu_stand_ins()
    assert all(getattr(owner, name) is not originals[name] for owner, name in REPLACED)


def initialise_twice() -> None:
    """Steps of a process that has imported everything that engines need."""
    assert torch.cuda.Event.__module__ == "megatron_ext.mcore.platform"
    assert "megatron_ext.mcore.adapter" in sys.modules
    assert not torch.distributed.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    for _ in range(2):
        platform.initialize()
        assert torch.distributed.get_world_size() == 1
        assert torch.distributed.get_backend() == "gloo"
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
    group = parallel_state.get_tensor_model_parallel_group()
    platform.initialize()
    assert parallel_state.get_tensor_model_parallel_group() is group
    for _ in range(2):
        platform.shut_down()
        assert not torch.distributed.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()
    platform.initialize()
    assert torch.distributed.is_initialized()
    platform.shut_down()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without CUDA")
def test_importing_starts_nothing_and_initialising_twice_is_fine():
    process = fork(initialise_twice)
    process.join()
    assert process.exitcode == 0


def test_settings_that_contradict_the_groups_are_refused(monkeypatch):
    platform.initialize()
    assert platform.group_sizes(ParallelConfig(check_ranks=True)).check_ranks
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    with pytest.raises(
        ConfigError, match="tensor_model_parallel_size 1 contradicts Megatron's groups of size 2; give 2"
    ):
        platform.group_sizes(ParallelConfig())
