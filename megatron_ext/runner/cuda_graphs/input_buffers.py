"""Static input and output buffers of a step, and its block tables: fixed device addresses, filled by one copy.

The host writes into one of two pinned buffers while the device may still read the other; an event marks the end of each
copy. All numbers have eight bytes, so int64 and float64 share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_ext.runner.cuda_graphs.buckets import Bucket
from megatron_ext.runner.input_writer import BlockRows
from megatron_ext.runner.layout import Layout
from megatron_ext.scheduling.step import LAST_SAMPLED, ScheduledChunk


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


class BlockTables:
    """Block table of each running state slot, on the device; a step sends only the rows that changed.

    Rows are sent before a step's graph, which gathers its requests' rows: they may change places between two steps.
    Block ids are int32, two in a number of the buffer that is sent.

    Args:
        slots: Number of running state slots, the padding slot included.
        width: Blocks of the longest table.
        padding: Block id after a table's end.
        device: Device of the tables.
    """

    def __init__(self, slots: int, width: int, padding: int, device: torch.device) -> None:
        self.rows = BlockRows(padding)
        self._tables = torch.full((slots, width), padding, dtype=torch.int32, device=device)
        count = slots + -(-slots * width // 2)
        self._staged = torch.zeros(count, dtype=torch.int64, device=device)
        self._host = [HostBuffer(count, device) for _ in range(2)]

    def send_rows(self) -> int:
        """Enqueue the copy of the rows that were written since the last call; return its bytes."""
        slots, rows = self.rows.changed(self._tables.shape[1])
        if not slots:
            return 0
        entries, buffer = rows.size, self._host[0]
        count = len(slots) + -(-entries // 2)
        buffer.wait()
        whole = buffer.whole[:count].numpy()
        whole[: len(slots)] = slots
        whole[len(slots) :].view(np.int32)[:entries] = rows.reshape(-1)
        self._staged[:count].copy_(buffer.whole[:count], non_blocking=True)
        buffer.mark()
        self._host.reverse()
        index, packed = self._staged[: len(slots)], self._staged[len(slots) : count]
        blocks = packed.view(torch.int32)[:entries].view(rows.shape)
        self._tables[:, : rows.shape[1]].index_copy_(0, index, blocks)
        return whole.nbytes

    def gather(self, slots: Tensor, width: int) -> Tensor:
        """Return the tables of slots [R] int64: [R, width] int32. Captured code."""
        return self._tables[:, :width].index_select(0, slots)


class AsyncModelOutput:
    """Copies of a captured step's outputs to the host: one copy a step, into one of two buffers.

    Args:
        whole: Device buffer that graphs write their outputs to, [n] int64.
        device: Device of `whole`.
    """

    def __init__(self, whole: Tensor, device: torch.device) -> None:
        self._whole = whole
        self._host = [HostBuffer(len(whole), device) for _ in range(2)]

    def fetch(self, count: int) -> Callable[[], Tensor]:
        """Enqueue the copy of the first `count` numbers.

        Returns:
            Function that waits for the copy and returns it, [count] int64 on the host; to be called before the output
            after the next one is fetched.
        """
        buffer = self._host[0]
        buffer.whole[:count].copy_(self._whole[:count], non_blocking=True)
        buffer.mark()
        self._host.reverse()

        def read() -> Tensor:
            buffer.wait()
            return buffer.whole[:count]

        return read


class PrevSampledTokenIds:
    """Sampled tokens that stay on the device from one step to the next, by the rows that the last step left (CU-6).

    A step writes its sampled tokens, row by row, into the output after the inputs of captured steps. The next graph
    reads the token of each decoding row from there or from the host's input, as an index in its inputs says. Rows may
    move between the two steps, and the graph is the same for both sources. The next eager step copies the tokens from
    there to its own inputs.

    Args:
        buffers: Static buffers of the graphs.
    """

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers = buffers
        self._rows: Mapping[int, int] | None = None  # by request id

    @property
    def are_on_device(self) -> bool:
        """True if the tokens of the last launched step are on the device."""
        return self._rows is not None

    def note(self, rows: Sequence[tuple[int, int]]) -> None:
        """Record that a step was launched that samples for these requests in these rows."""
        self._rows = dict(rows)

    def forget(self) -> None:
        """Discard the recorded rows: another step has run since, or no step has used these buffers."""
        self._rows = None

    def places_of(self, decodes: Sequence[ScheduledChunk], layout: Layout) -> list[int]:
        """Return the index of each decoding row's token, counted from the start of the whole buffer."""
        first_id = layout.first("input_ids")
        return [
            self.place_of(chunk.request_id) if chunk.token_ids[0] == LAST_SAMPLED else first_id + row
            for row, chunk in enumerate(decodes)
        ]

    def place_of(self, request_id: int) -> int:
        """Return the index of a request's token in the whole buffer."""
        assert self._rows is not None, "no step has left its tokens"
        return self._buffers.first_token + self._rows[request_id]

    def read(self, places: Tensor) -> Tensor:
        """Return the tokens of an eager step by their indices in the whole buffer, [n] -> [n]."""
        return self._buffers.gather(places)

    # Captured code.

    def fill_in(self, bucket: Bucket, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the token ids of a step, [T]: decoding rows from their indexed source, prefills from the host."""
        decoding = self._buffers.gather(parts["token_places"])
        if not bucket.prefills:
            return decoding
        return torch.cat([decoding, parts["input_ids"][bucket.decodes :]])
