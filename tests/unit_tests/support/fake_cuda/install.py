"""`torch.cuda` of the fake device. What a build without CUDA lacks is put there, once a process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from tests.unit_tests.support.fake_cuda import graphs, kernels, streams, watching

NAME = "pretended CUDA device"
_library = torch.library.Library("pretended", "IMPL")


def install() -> None:
    """Let torch find the device; its library is loaded."""
    _library.impl("note", watching.note, "CompositeExplicitAutograd")
    for name, found in _PLAIN.items():
        setattr(torch.cuda, name, found)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _nothing)
    torch.cuda.default_generators = (torch.Generator("cuda"),)
    torch.cuda._initialized = True
    torch.version.cuda = "13.0"
    _without_nccl()
    kernels.install()


def _nothing(*_: object, **__: object) -> None:
    return


def _set_device(device: object) -> None:
    index = device if isinstance(device, int) else torch.device(device).index  # type: ignore[arg-type]
    if index not in (0, None):
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}")


def _set_sync_debug_mode(mode: str | int) -> None:
    watching.STATE.sync_mode = mode if isinstance(mode, str) else ("default", "warn", "error")[mode]


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(name=NAME, major=9, minor=0, total_memory=_memory()[0], multi_processor_count=132)


def _memory() -> list[int]:
    """Bytes in all, allocated, reserved by the allocator, and the most that were allocated."""
    found: list[int] = torch.ops.pretended.memory()
    return found


def _mem_get_info(device: object = None) -> tuple[int, int]:
    total, _, reserved, _ = _memory()
    return total - reserved, total


def _stats(device: object = None) -> dict[str, int]:
    _, allocated, reserved, peak = _memory()
    bytes_of = {"allocated_bytes.all.current": allocated, "allocated_bytes.all.peak": peak}
    return {"allocation.all.current": 0, "reserved_bytes.all.current": reserved, **bytes_of}


def _without_nccl() -> None:
    """Make process groups of one rank use gloo where nccl is requested; they do not communicate."""
    start, group = torch.distributed.init_process_group, torch.distributed.new_group

    def with_gloo(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            found = ["gloo" if one == "nccl" else one for one in args]
            return function(*found, **{k: "gloo" if v == "nccl" else v for k, v in kwargs.items()})

        return call

    torch.distributed.init_process_group, torch.distributed.new_group = with_gloo(start), with_gloo(group)


_PLAIN: dict[str, object] = {
    "_lazy_init": _nothing,
    "_lazy_call": lambda function, **_: function(),
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": _nothing,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _set_device,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: NAME,
    "get_device_properties": _properties,
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": _mem_get_info,
    "memory_stats": _stats,
    "memory_allocated": lambda device=None: _memory()[1],
    "max_memory_allocated": lambda device=None: _memory()[3],
    "memory_reserved": lambda device=None: _memory()[2],
    "reset_peak_memory_stats": lambda device=None: torch.ops.pretended.reset_peak(),
    "empty_cache": lambda: torch.ops.pretended.empty_cache(),
    "set_sync_debug_mode": _set_sync_debug_mode,
    "Event": streams.Event,
    "Stream": streams.Stream,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "stream": streams.stream,
    "synchronize": streams.synchronize,
    "CUDAGraph": graphs.CUDAGraph,
    "graph": graphs.graph,
    "graph_pool_handle": graphs.graph_pool_handle,
    "is_current_stream_capturing": lambda: watching.STATE.is_capturing,
}
