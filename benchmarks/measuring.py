"""Helpers of every benchmark: arguments, timing, the machine's matrix-product rate, a header naming the machine."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "numpy", "transformers", "megatron-core", "megatron-ext")


def part_arguments(text: str | None) -> argparse.ArgumentParser:
    """Parser of the arguments that `benchmarks.bench` passes to each of its parts."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="so little that only errors show")
    parser.add_argument("--figures", type=Path, metavar="FILE.json", help="write what was found there, too")
    return parser


def keep_figures(options: argparse.Namespace, figures: object) -> None:
    """Write them where that is asked for."""
    if options.figures is not None:
        options.figures.write_text(json.dumps(figures, indent=1), "utf-8")


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
    versions = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return (
        f"device: {name}, {torch.get_num_threads()} threads, {dtype}\n"
        f"versions: Python {platform.python_version()}, {versions}{_cuda(device)}\n"
        f"command: python -m benchmarks.{' '.join([_module(Path(sys.argv[0])), *sys.argv[1:]])}"
    )


def _version(package: str) -> str:
    """A checkout on PYTHONPATH has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _cuda(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f", CUDA {torch.version.cuda}, compute capability {capability}"


def _module(path: Path) -> str:
    """Below `benchmarks`, as `python -m` is told it."""
    parts = path.with_suffix("").parts
    below = parts[len(parts) - parts[::-1].index("benchmarks") :] if "benchmarks" in parts else parts[-1:]
    return ".".join(below[:-1] if len(below) > 1 and below[-1] == "__main__" else below)
