"""Platform layer for megatron-core: CPU stand-ins of CUDA calls, process groups, random number trackers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch.distributed import Store, distributed_c10d

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.heap import give_back_freed_memory, keep_freed_memory
from megatron_ext.memory.host_limits import allocating, available_bytes, enough_for_the_embedded_model
from megatron_ext.parallel.failure import sign_in

_THREADS = 2  # per process group with several ranks, as in torch
_NO_MEMORY = {"allocation.all.current": 0, "allocated_bytes.all.current": 0, "reserved_bytes.all.current": 0}


@contextlib.contextmanager
def sharing_one_device(threads: int) -> Iterator[None]:
    """Create gloo groups on one shared network device inside this context.

    torch gives each group its own device, with one thread that polls sockets and two that run collectives.
    megatron-core makes some twenty groups, so a rank would have sixty idle threads.

    Args:
        threads: Threads per group that run its collectives. With one thread they run in the order of their launch.
    """
    if not distributed_c10d.is_gloo_available():
        yield
        return
    plain = distributed_c10d.ProcessGroupGloo
    options_of = plain._Options  # type: ignore[attr-defined]  # torch's own description of the class lacks it
    device = plain.create_default_device()

    class SharingGroup(plain):  # type: ignore[misc,valid-type]  # torch calls `isinstance` with the replaced name
        """Gloo group on the shared device."""

        def __init__(
            self, store: Store, rank: int, size: int, timeout: timedelta = distributed_c10d.default_pg_timeout
        ) -> None:
            options = options_of()
            options._devices, options._threads, options._timeout = [device], threads, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharingGroup  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = plain  # type: ignore[misc]


class _NoQueue:
    """`torch.cuda.Event` and `torch.cuda.Stream` for a device without a queue: all that was asked for is done.

    A class replaces a class here because other packages use both in annotations at import time.
    """

    def __init__(self, *_: object, **__: object) -> None:
        return

    def _done(self, *_: object) -> _NoQueue:
        return self

    record = record_event = synchronize = query = wait_stream = _done


def _do_nothing(*_: object, **__: object) -> None:
    return


def device() -> torch.device:
    """Return the device of models and pools: the current CUDA device, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def available_memory(on: torch.device) -> int:
    """Return the bytes that this process could still allocate on a device; on the host, by the narrowest limit."""
    give_back_freed_memory()
    return torch.cuda.mem_get_info(on)[0] if on.type == "cuda" else available_bytes()


def install_cpu_stand_ins() -> None:
    """Replace the CUDA calls that upstream makes unconditionally; a no-op if CUDA is present.

    Call before `megatron.core.inference.engines` is imported: it binds the nvtx functions by name.
    """
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.Event = _NoQueue  # type: ignore[assignment,misc]
    torch.cuda.Stream = _NoQueue  # type: ignore[assignment,misc]
    torch.cuda.current_stream = _NoQueue  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = _do_nothing
    torch.cuda.memory_stats = lambda *_: dict(_NO_MEMORY)
    torch.cuda.nvtx.range_push = _do_nothing
    torch.cuda.nvtx.range_pop = _do_nothing


def initialize(parallel: ParallelConfig | None = None) -> None:
    """Start torch.distributed and Megatron's model-parallel groups, once; later calls are no-ops.

    Without CUDA, memory that one step frees is kept for the next, see `memory/heap.py`. Under torchrun the environment
    identifies this rank; otherwise this is a world of one, without any port.

    Args:
        parallel: Group sizes, which must divide the world, and communication settings; None for the existing groups, or
            for a world of one.

    Raises:
        ConfigError: There is no memory for the threads of torch.distributed.
    """
    from megatron.core import tensor_parallel

    given = parallel or ParallelConfig()
    backend, timeout = given.distributed_backend or "nccl", timedelta(minutes=given.distributed_timeout_minutes)
    if not torch.cuda.is_available():
        backend = "gloo"  # whatever was asked for, as `console.start` reports
        keep_freed_memory()
    with sharing_one_device(_THREADS if "RANK" in os.environ else 1):
        _make_groups(given, backend, timeout)
    # The tracker for inference hands out no-op forks: without it any layer that would draw random numbers refuses.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)


def _make_groups(given: ParallelConfig, backend: str, timeout: timedelta) -> None:
    """Create the groups that do not exist."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        _start_distributed(backend, timeout)
    sign_in()  # before the groups: the registry then detects a rank that ends during their creation
    if not parallel_state.model_parallel_is_initialized():
        # Upstream's own argument for the timeout is in minutes, too, and may be a fraction.
        parallel_state.initialize_model_parallel(
            given.tensor_model_parallel_size,
            given.pipeline_model_parallel_size,
            expert_model_parallel_size=given.expert_model_parallel_size,
            expert_tensor_parallel_size=given.expert_tensor_size,
            distributed_timeout_minutes=given.distributed_timeout_minutes,
        )


def group_sizes(parallel: ParallelConfig | None = None) -> ParallelConfig:
    """Return the sizes of Megatron's existing groups.

    Args:
        parallel: Settings for the fields that no group has; None if unknown.

    Raises:
        ConfigError: The settings contradict the groups.
    """
    from megatron.core import parallel_state

    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    if parallel is None:
        return ParallelConfig(**sizes)
    asked = dataclasses.replace(parallel, expert_tensor_parallel_size=parallel.expert_tensor_size)
    for name, found in sizes.items():
        if getattr(asked, name) != found:
            raise ConfigError(
                f"{name} {getattr(asked, name)} contradicts Megatron's groups of size {found}; give {found}"
            )
    return asked


def _start_distributed(backend: str, timeout: timedelta) -> None:
    if torch.cuda.is_available():
        # A launcher may show each rank its own devices only, as Ray does.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    with allocating("the threads of torch.distributed", enough_for_the_embedded_model):
        if "RANK" in os.environ:
            torch.distributed.init_process_group(backend, timeout=timeout)
        else:
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def shut_down() -> None:
    """Destroy the process groups, so that the process ends without a warning."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
