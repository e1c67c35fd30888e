"""EX-7: the CPU stand-ins are there only where CUDA is not; initialising twice is initialising once."""

from __future__ import annotations

import sys

import pytest
import torch
from megatron.core import parallel_state

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


class TestStandIns:
    """Answers of the stand-ins."""

    @pytest.fixture(autouse=True)
    def installed(self, originals, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        platform.install_cpu_stand_ins()

    def test_current_device_is_a_device(self):
        assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"

    def test_an_event_measures_milliseconds(self, monkeypatch):
        times = iter([1.0, 1.5])
        monkeypatch.setattr(platform.time, "perf_counter", lambda: next(times))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        end.synchronize()
        assert end.query()
        assert start.elapsed_time(end) == 500.0

    def test_there_is_one_stream_and_it_is_done(self):
        stream = torch.cuda.Stream(priority=1)
        assert torch.cuda.current_stream() == stream
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.current_stream())
        assert stream.record_event().query()

    def test_a_stream_is_a_class(self):
        """Other packages (transformers) say `torch.cuda.Stream | None` where they are imported."""
        assert torch.cuda.Stream | None

    def test_the_rest_does_nothing(self):
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push("name")
        torch.cuda.nvtx.range_pop()
        assert set(torch.cuda.memory_stats().values()) == {0}

    def test_the_device_is_the_cpu(self):
        assert platform.device() == torch.device("cpu")


def test_the_device_is_the_current_cuda_device_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert platform.device() == torch.device("cuda", 3)


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
