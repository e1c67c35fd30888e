"""Libraries whose kernels compute some operators on CUDA devices: imported on request, never required.

An operator that a library computes has a backend with the name of an `OperatorLibrary`, in `mamba_ssm.py` or
`paged_attention/flashinfer.py`. No such backend is chosen by default; all other operators are computed as without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from megatron_ext.ops import triton

MAMBA_SSM: Final = "mamba-ssm"
FLASHINFER: Final = "flashinfer"
WINDOWS = (2, 3, 4)
"""Windows that causal-conv1d's kernels support."""
HEAD_CHANNELS = (64, 128, 256)
"""Channels of a head that FlashInfer's kernels support."""
HALVES = (torch.bfloat16, torch.float16)
"""Types that FlashInfer's kernels support."""


@dataclass(frozen=True)
class Package:
    """Package of a library, with the one name that is imported from it.

    Attributes:
        distribution: Name on the package index.
        versions: Supported versions, as in `pyproject.toml`.
        module: Module to import.
        name: Name in this module.
    """

    distribution: str
    versions: str
    module: str
    name: str

    def problem(self) -> str | None:
        """Return why the package cannot be used; None if it can be. Imports it."""
        wanted = f"{self.distribution}{self.versions}"
        try:
            found = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{self.distribution} is not installed (pip install '{wanted}')"
        if not SpecifierSet(self.versions).contains(found, prereleases=True):
            return f"{self.distribution} {found} is installed, and only {self.versions} is supported"
        try:
            self.function()
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # compiled for another torch or device
            return f"{self.distribution} {found} cannot be imported ({error})"
        return None

    def function(self) -> Callable[..., Tensor]:
        """Return the imported function."""
        found: Callable[..., Tensor] = getattr(importlib.import_module(self.module), self.name)
        return found


SELECTIVE_STATE_UPDATE = Package(
    "mamba-ssm", ">=2.3,<2.4", "mamba_ssm.ops.triton.selective_state_update", "selective_state_update"
)
CAUSAL_CONV1D_UPDATE = Package("causal-conv1d", ">=1.6,<1.8", "causal_conv1d", "causal_conv1d_update")
PAGED_PREFILL = Package("flashinfer-python", ">=0.6,<0.8", "flashinfer", "BatchPrefillWithPagedKVCacheWrapper")


@dataclass(frozen=True)
class OperatorShapes:
    """Shapes and types of an engine's operators on this rank, which a library has to support.

    Attributes:
        dtype: Type of the parameters, and of keys and values.
        head_channels: Channels of an attention head; None without attention layers.
        has_sinks: Whether attention has sinks.
        conv_window: Window of the convolution; None without recurrent layers.
        conv_dtype: Type of the convolution's states.
        is_captured: Whether steps are captured.
        is_whole: Whether this is the whole model; a stage may have none of the layers that a library computes.
    """

    dtype: torch.dtype
    head_channels: int | None = None
    has_sinks: bool = False
    conv_window: int | None = None
    conv_dtype: torch.dtype | None = None
    is_captured: bool = False
    is_whole: bool = True


@dataclass(frozen=True)
class OperatorLibrary:
    """Library that computes operators.

    Attributes:
        packages: Packages that it consists of.
        lacks: Function that returns why it does not support given shapes, or None.
        needs_triton: Whether the Triton kernels compute the rest of its operators.
    """

    packages: tuple[Package, ...]
    lacks: Callable[[OperatorShapes], str | None]
    needs_triton: bool = False

    def problem(self, device: torch.device, shapes: OperatorShapes | None = None) -> str | None:
        """Return why the library cannot be used on a device, for given shapes if any; None if it can be."""
        if device.type != "cuda":
            return f"its kernels run on CUDA devices, and the model is on {device.type}"
        missing = triton.problem(device) if self.needs_triton else None
        for package in self.packages:
            missing = missing or package.problem()
        return missing or (None if shapes is None else self.lacks(shapes))


def _mamba_lacks(shapes: OperatorShapes) -> str | None:
    if shapes.conv_window is None:
        return "it computes recurrent layers, and the model has none" if shapes.is_whole else None
    if shapes.conv_window not in WINDOWS:
        return f"it has convolutions with windows of {_listed(WINDOWS)}, and the model's have {shapes.conv_window}"
    if shapes.conv_dtype != shapes.dtype:
        return (
            f"its convolution needs states of the parameters' type, {shapes.dtype}, and they are {shapes.conv_dtype}; "
            "leave out --mamba-inference-conv-states-dtype"
        )
    return None


def _flashinfer_lacks(shapes: OperatorShapes) -> str | None:
    if shapes.head_channels is None:
        return "it computes attention, and the model has none" if shapes.is_whole else None
    if shapes.dtype not in HALVES:
        return f"it computes in 16 bits, and the model is in {shapes.dtype}; give --bf16 or --fp16"
    if shapes.head_channels not in HEAD_CHANNELS:
        return f"it has heads of {_listed(HEAD_CHANNELS)} channels, and the model's have {shapes.head_channels}"
    if shapes.has_sinks:
        return "its kernels are used without attention sinks, and the model has them"
    if shapes.is_captured:
        return "it plans each step from lengths on the host, and captured steps have none; leave out --cuda-graph-impl"
    return None


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


LIBRARIES: Final = {
    MAMBA_SSM: OperatorLibrary((SELECTIVE_STATE_UPDATE, CAUSAL_CONV1D_UPDATE), _mamba_lacks, needs_triton=True),
    FLASHINFER: OperatorLibrary((PAGED_PREFILL,), _flashinfer_lacks, needs_triton=True),
}
"""Libraries by the name of their backends."""
