"""What megatron-core needs of the machine: CUDA calls that have a CPU stand-in, process groups, random trackers."""

from __future__ import annotations

import os
import time

import torch

from megatron_ext.memory.heap import give_back_freed_memory, keep_freed_memory
from megatron_ext.memory.limits import allocating, available_bytes, enough_for_the_embedded_model


class _HostTimer:
    """`torch.cuda.Event` for a device that has no queue: an event has happened when it is recorded."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._recorded_at: float | None = None

    def record(self, stream: object = None) -> None:
        self._recorded_at = time.perf_counter()

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostTimer) -> float:
        """Milliseconds between the two records."""
        assert self._recorded_at is not None, "the start event was never recorded"
        assert end._recorded_at is not None, "the end event was never recorded"
        return (end._recorded_at - self._recorded_at) * 1e3


def _do_nothing(*_: object, **__: object) -> None:
    return


_NO_MEMORY = {"allocation.all.current": 0, "allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}


def device() -> torch.device:
    """The device that models and pools live on: the current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def available_memory(on: torch.device) -> int:
    """Bytes that this process could still allocate on a device; on the host by the narrowest of its limits."""
    if on.type == "cuda":
        return torch.cuda.mem_get_info(on)[0]
    give_back_freed_memory()
    return available_bytes()


def install_cpu_stand_ins() -> None:
    """Replace the CUDA calls that upstream makes without asking; does nothing where CUDA is present.

    Call before `megatron.core.inference.engines` is imported: it binds the nvtx functions by name.
    """
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Event = _HostTimer  # type: ignore[assignment,misc]
    torch.cuda.synchronize = _do_nothing
    torch.cuda.memory_stats = lambda *_: dict(_NO_MEMORY)
    torch.cuda.nvtx.range_push = _do_nothing
    torch.cuda.nvtx.range_pop = _do_nothing


def initialize(
    *,
    backend: str | None = None,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
) -> None:
    """Start torch.distributed and Megatron's model-parallel groups, once; later calls do nothing.

    Without CUDA memory that one step frees is kept for the next, see `memory/heap.py`. Under torchrun the environment
    says who we are; otherwise this is a world of one, without any port.

    Args:
        backend: "nccl" or "gloo"; default by device.

    Raises:
        ConfigError: There is no memory for its threads.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not torch.cuda.is_available():
        keep_freed_memory()
    if not torch.distributed.is_initialized():
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if "RANK" in os.environ:
            torch.distributed.init_process_group(backend)
        else:
            store = torch.distributed.HashStore()
            with allocating("the threads of torch.distributed", enough_for_the_embedded_model):
                torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            expert_model_parallel_size=expert_model_parallel_size,
        )
    # The tracker for inference hands out no-op forks: without it any layer that would draw random numbers refuses.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def shut_down() -> None:
    """Leave the process groups, so that the process ends without a warning."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
