"""What every benchmark needs: timing, the machine's matrix-product rate, and a header that says where it ran."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = ("torch", "transformers", "megatron-core", "megatron-ext")


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median duration of `work`, after one call that warms up."""
    work()
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        synchronize()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def synchronize() -> None:
    """Wait for the device, if there is one that works by itself."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024) -> float:
    """Floating-point operations a second of a square matrix product, measured now."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / seconds(lambda: left @ right, repeats=9)


def header(device: torch.device, dtype: torch.dtype) -> str:
    """Device, versions, threads, command: what a reader needs to judge the figures."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return (
        f"device: {name}, {torch.get_num_threads()} threads, {dtype}\n"
        f"versions: Python {platform.python_version()}, {versions}\n"
        f"command: python -m benchmarks.{' '.join([Path(sys.argv[0]).stem, *sys.argv[1:]])}"
    )
