"""Asynchronous copies of host tensors to the device, which do not wait for the device's work."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """Copy a host tensor to a device; returns the tensor itself if the device is the host.

    Copies to CUDA go through pinned memory, which torch reuses only after the copy is done: any other copy waits for
    all previously enqueued work.
    """
    if device is None or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
