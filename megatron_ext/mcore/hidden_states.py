"""Hidden states of a model's last tokens, kept for each request while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.runner.cuda_graphs.input_batch import DUMMY_REQUEST
from megatron_ext.scheduling.running_slots import RunningSlot, RunningSlots
from megatron_ext.scheduling.step import ScheduledChunk

KEPT_TOKENS = 256  # hidden states of a request


class HiddenStates:
    """Hidden states after the final norm, copied from each step as it is computed; positions in a ring per request.

    A step that is computed again, or that follows rejected drafts, overwrites them. A captured or recorded step writes
    inside `writing`, to rows that are set before it.

    Args:
        model: Model whose stack is watched.
        context: Context of the model's steps.
        requests: Maximum number of requests in a step.
        captured_tokens: Maximum number of tokens of a captured step, padding included; 0 if none is captured.
        recorded_tokens: Maximum number of tokens of a recorded step, which has no padding; 0 if none is recorded.
        watches: Whether the stack's outputs are kept; else only states that the caller writes.

    Attributes:
        hook: Id of the forward hook on the stack; see `KeptOutputs`.
    """

    hook = -1

    def __init__(
        self,
        model: HybridModel,
        context: InferenceContext,
        requests: int,
        captured_tokens: int = 0,
        *,
        recorded_tokens: int = 0,
        watches: bool = True,
    ) -> None:
        self._context, self._requests = context, requests
        self._is_padded, self._fixed_tokens = captured_tokens > 0, max(captured_tokens, recorded_tokens)
        self._staged: dict[int, tuple[RunningSlot, range]] = {}
        self._targets: Tensor | None = None  # row of each token of a captured step; the one after all others is unused
        parameter = next(model.parameters())
        self._like = parameter.new_empty(0)
        self._width = model.config.hidden_size
        self._slots = RunningSlots(requests)
        self._places: dict[int, tuple[RunningSlot, range]] = {}  # the most recently computed request last
        self._rows: Tensor | None = None
        self.allocate()
        take = weakref.WeakMethod(self._take)  # the model may live longer

        if not watches:
            return

        def watch(_: nn.Module, __: object, output: Tensor) -> None:
            if (found := take()) is not None:
                found(output)

        handle = model.decoder.register_forward_hook(watch)
        self.hook = handle.id
        weakref.finalize(self, handle.remove)

    def allocate(self) -> None:
        """Allocate the rows if they are not: captured steps write to these very ones."""
        if self._rows is not None:
            return
        self._rows = self._like.new_empty(self._unused + self._is_padded, self._width)
        if self._fixed_tokens:
            self._targets = torch.full((self._fixed_tokens,), self._unused, device=self._like.device)

    def free(self) -> None:
        """Free the rows and forget all requests."""
        self.reset()
        self._rows = self._targets = None

    def kept(self, request_id: int) -> range:
        """Return the positions of a request whose hidden states are kept; see `KeptStates`."""
        return self._places[request_id][1] if request_id in self._places else range(0)

    def forget(self, request_id: int) -> None:
        """Drop a request's hidden states; see `KeptStates`."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self._slots.give_back(place[0])

    def reset(self) -> None:
        """Drop all hidden states; see `KeptStates`."""
        for request_id in [*self._places]:
            self.forget(request_id)

    @property
    def _unused(self) -> int:
        return self._requests * KEPT_TOKENS

    @contextmanager
    def writing(self, chunks: Sequence[ScheduledChunk]) -> Iterator[None]:
        """Set the rows that a captured or recorded step of these chunks, one per row of the step, writes to.

        Unless the step raises, they are kept. Other steps, which compute only padding, write to no row that is read.
        """
        if self._targets is None:
            yield
            return
        sources, targets, self._staged = self._places_of(chunks)
        try:
            if self._is_padded:
                rows = np.full(self._fixed_tokens, self._unused)
                rows[sources] = targets
                self._targets.copy_(torch.from_numpy(rows))
            else:  # a recorded step has these tokens only, on the CPU
                self._targets.numpy()[: len(targets)] = targets
            yield
            self._keep(self._staged)
        finally:
            self._staged = {}
            if self._is_padded:
                self._targets.fill_(self._unused)

    def read(self, wanted: Sequence[tuple[int, range]]) -> Tensor:
        """Return the hidden states of positions of some requests, one after the other, [n, h]."""
        rows = [_ring(self._places[request_id][0], positions) for request_id, positions in wanted]
        assert self._rows is not None, "the engine is suspended"
        return self._rows[self._index(np.concatenate(rows))]

    def _take(self, output: Tensor) -> None:
        """Copy the last hidden states of each chunk of the staged step, [T, 1, h]."""
        step = self._context.step
        if step is None or self._rows is None:
            return
        if self._targets is not None and (self._staged or step.paged_batch.has_static_shapes):
            self._rows.index_copy_(0, self._targets[: len(output)], output[:, 0])
            return
        self.write(step.chunks, output)

    def write(self, chunks: Sequence[ScheduledChunk], output: Tensor) -> None:
        """Copy the last hidden states of each chunk of a step, [T, 1, h]."""
        assert self._rows is not None, "the engine is suspended"
        sources, targets, places = self._places_of(chunks)
        self._rows[self._index(np.array(targets, np.int64))] = output[self._index(np.array(sources, np.int64)), 0]
        self._keep(places)

    def _places_of(
        self, chunks: Sequence[ScheduledChunk]
    ) -> tuple[list[int], list[int], dict[int, tuple[RunningSlot, range]]]:
        """Return the tokens of a step to keep, the rows for them, and each request's kept positions after the step."""
        running, first = {chunk.request_id for chunk in chunks}, 0
        sources: list[int] = []
        targets: list[int] = []
        places = {}
        for chunk in chunks:
            if chunk.request_id != DUMMY_REQUEST:
                new = range(max(chunk.start, chunk.end - KEPT_TOKENS), chunk.end)
                if chunk.request_id not in self._places:
                    self._places[chunk.request_id] = self._slot(running), range(0)
                slot, before = self._places[chunk.request_id]
                begin = before.start if before and before.start <= chunk.start <= before.stop else new.start
                places[chunk.request_id] = slot, range(max(begin, chunk.end - KEPT_TOKENS), chunk.end)
                sources += range(new.start - chunk.start + first, first + chunk.length)
                targets += [slot * KEPT_TOKENS + position % KEPT_TOKENS for position in new]
            first += chunk.length
        return sources, targets, places

    def _keep(self, places: Mapping[int, tuple[RunningSlot, range]]) -> None:
        """Note the kept positions after a step; its requests become the most recent ones."""
        for request_id, place in places.items():
            self._places.pop(request_id, None)
            self._places[request_id] = place

    def _slot(self, running: set[int]) -> RunningSlot:
        """Return a free slot; if all are in use, the slot of the least recently computed request."""
        if not self._slots.free_count:
            self.forget(next(one for one in self._places if one not in running))
        return self._slots.take()

    def _index(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(self._like.device, non_blocking=True)


def _ring(slot: RunningSlot, positions: range) -> np.ndarray:
    """Return the rows of positions of a request."""
    return slot * KEPT_TOKENS + np.arange(positions.start, positions.stop) % KEPT_TOKENS
