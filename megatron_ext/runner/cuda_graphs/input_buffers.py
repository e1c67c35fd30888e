"""Static input and output buffers of a step: fixed device addresses, filled by one copy.

The host writes into one of two pinned buffers while the device may still read the other; an event marks the end of each
copy. All numbers have eight bytes, so int64 and float64 share a buffer.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from megatron_ext.runner.layout import Layout


class HostBuffer:
    """Host buffer, pinned if the device is CUDA; free for reuse when its copy is done."""

    def __init__(self, count: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.whole = torch.zeros(count, dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._views: dict[int, tuple[Layout, dict[str, np.ndarray]]] = {}  # by the layout's identity

    def views(self, layout: Layout) -> dict[str, np.ndarray]:
        """Return the arrays of a layout; cached, since making the views takes as long as writing them."""
        if id(layout) not in self._views:
            self._views[id(layout)] = layout, {name: one.numpy() for name, one in layout.parts(self.whole).items()}
        return self._views[id(layout)][1]

    def wait(self) -> None:
        """Wait until no copy reads or writes the buffer any more."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        """Record that a copy from or to the buffer was just enqueued."""
        if self._copied is not None:
            self._copied.record()


class InputBuffers:
    """Input buffers for the largest of some layouts, followed on the device by the output of a step.

    Args:
        layouts: Layouts of all steps.
        device: Device that computes the steps.
        answer: Maximum size of an output, in numbers; it begins with the sampled tokens, by rows.
    """

    def __init__(self, layouts: Iterable[Layout], device: torch.device, answer: int = 0) -> None:
        count = max(layout.count for layout in layouts)
        self._device = torch.zeros(count + answer, dtype=torch.int64, device=device)
        self.answer = self._device[count:]
        self.first_token = count  # index of the last step's first token, for `gather`
        self._host = [HostBuffer(count, device) for _ in range(2)]

    def parts(self, layout: Layout) -> dict[str, Tensor]:
        """Return the device's views of the inputs that were sent."""
        return layout.parts(self._device)

    def gather(self, index: Tensor) -> Tensor:
        """Return numbers by index into the whole buffer, where the last output follows the inputs: [n] -> [n]."""
        return self._device.index_select(0, index)

    def open(self, layout: Layout) -> dict[str, np.ndarray]:
        """Return the host arrays for the next inputs, after the copy before the last one is done."""
        self._host[0].wait()
        return self._host[0].views(layout)

    def send(self, layout: Layout, *, unused: int = 0) -> None:
        """Enqueue the single copy of a step's inputs, without the last `unused` numbers of the layout."""
        count, buffer = layout.count - unused, self._host[0]
        self._device[:count].copy_(buffer.whole[:count], non_blocking=True)
        buffer.mark()
        self._host.reverse()


class AsyncModelOutput:
    """Copies of a captured step's outputs to the host: one copy a step, into one of two buffers.

    Args:
        whole: Device buffer that graphs write their outputs to, [n] int64.
        device: Device of `whole`.
    """

    def __init__(self, whole: Tensor, device: torch.device) -> None:
        self._whole = whole
        self._host = [HostBuffer(len(whole), device) for _ in range(2)]

    def fetch(self, count: int) -> PendingOutput:
        """Enqueue the copy of the first `count` numbers."""
        buffer = self._host[0]
        buffer.whole[:count].copy_(self._whole[:count], non_blocking=True)
        buffer.mark()
        self._host.reverse()
        return PendingOutput(buffer, count)


class PendingOutput:
    """Output that may still be computed; must be read before the output after the next one is fetched."""

    def __init__(self, buffer: HostBuffer, count: int) -> None:
        self._buffer, self._count = buffer, count

    def read(self) -> Tensor:
        """Wait for the copy and return it: [count] int64, on the host."""
        self._buffer.wait()
        return self._buffer.whole[: self._count]
