"""Where a step's numbers lie on the device: always at the same addresses, filled by one copy.

The host writes into one of two pinned buffers while the device may still read the other; an event says when it has.
All numbers have eight bytes, so whole ones and others share a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Names and shapes, one behind the other; `fractions` are those of float64, all others are int64."""

    shapes: Mapping[str, Shape]
    fractions: frozenset[str]

    @cached_property
    def count(self) -> int:
        """Numbers of all together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def first(self, name: str) -> int:
        """Where the numbers of a name begin."""
        before = list(self.shapes)[: list(self.shapes).index(name)]
        return sum(math.prod(self.shapes[one]) for one in before)

    def parts(self, whole: Tensor) -> dict[str, Tensor]:
        """Views of a buffer of int64."""
        parts = whole[: self.count].split([math.prod(shape) for shape in self.shapes.values()])
        return {
            name: (part.view(torch.float64) if name in self.fractions else part).view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


class _HostBuffer:
    """Pinned where there is something to copy to, and free again when that has been done."""

    def __init__(self, count: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.whole = torch.zeros(count, dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None
        self._views: dict[int, tuple[Layout, dict[str, np.ndarray]]] = {}  # by the layout's identity

    def views(self, layout: Layout) -> dict[str, np.ndarray]:
        """Where the numbers of a layout are; made once: that takes as long as writing them."""
        if id(layout) not in self._views:
            self._views[id(layout)] = layout, {name: one.numpy() for name, one in layout.parts(self.whole).items()}
        return self._views[id(layout)][1]

    def wait(self) -> None:
        """Until nothing reads or writes it any more."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        """A copy from or to it has just been enqueued."""
        if self._copied is not None:
            self._copied.record()


class InputBuffers:
    """Buffers for the largest of some layouts; on the device there is room behind it for what a step answers.

    Args:
        layouts: Of all steps.
        device: Where they are computed.
        answer: Numbers of an answer at most; it begins with the sampled tokens, by rows.
    """

    def __init__(self, layouts: Iterable[Layout], device: torch.device, answer: int = 0) -> None:
        count = max(layout.count for layout in layouts)
        self._device = torch.zeros(count + answer, dtype=torch.int64, device=device)
        self.answer = self._device[count:]
        self.first_token = count  # where the last step's tokens begin, for `gather`
        self._host = [_HostBuffer(count, device) for _ in range(2)]

    def parts(self, layout: Layout) -> dict[str, Tensor]:
        """Where the device finds what was sent."""
        return layout.parts(self._device)

    def gather(self, index: Tensor) -> Tensor:
        """Numbers by their places in the whole buffer, the last answer behind all layouts: [n] -> [n]."""
        return self._device.index_select(0, index)

    def open(self, layout: Layout) -> dict[str, np.ndarray]:
        """Where the host writes what is to be sent next; waits until the copy before the last one is done."""
        self._host[0].wait()
        return self._host[0].views(layout)

    def send(self, layout: Layout, *, unused: int = 0) -> None:
        """Enqueue the one copy of a step, but for so many numbers at the end that nobody looks at."""
        count, buffer = layout.count - unused, self._host[0]
        self._device[:count].copy_(buffer.whole[:count], non_blocking=True)
        buffer.mark()
        self._host.reverse()


class AsyncModelOutput:
    """What programs answer on its way back: one copy a step, into one of two buffers.

    Args:
        whole: [n] int64, where programs write it.
        device: Where that is.
    """

    def __init__(self, whole: Tensor, device: torch.device) -> None:
        self._whole = whole
        self._host = [_HostBuffer(len(whole), device) for _ in range(2)]

    def fetch(self, count: int) -> PendingOutput:
        """Enqueue the copy of the first so many numbers."""
        buffer = self._host[0]
        buffer.whole[:count].copy_(self._whole[:count], non_blocking=True)
        buffer.mark()
        self._host.reverse()
        return PendingOutput(buffer, count)


class PendingOutput:
    """Numbers that may still be computed; to be read before the answer after the next one is fetched."""

    def __init__(self, buffer: _HostBuffer, count: int) -> None:
        self._buffer, self._count = buffer, count

    def read(self) -> Tensor:
        """Wait for them: [count] int64, on the host."""
        self._buffer.wait()
        return self._buffer.whole[: self._count]
