"""What the host makes for a step on its way to the device, without waiting for what the device is doing."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """A tensor of the host's on a device; itself where that is the host.

    To CUDA by way of pinned memory, which torch gives to nobody else before the copy is done: any other copy waits for
    all that was enqueued before it.
    """
    if device is None or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
