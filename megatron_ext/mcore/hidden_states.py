"""Hidden states of a model's last tokens, kept for each request while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.scheduling.running_slots import RunningSlot, RunningSlots

KEPT_TOKENS = 256  # hidden states of a request


class HiddenStates:
    """Hidden states after the final norm, copied from each step as it is computed; positions in a ring per request.

    A step that is computed again, or that follows rejected drafts, overwrites them.

    Args:
        model: Model whose stack is watched.
        context: Context of the model's steps.
        requests: Maximum number of requests in a step.
    """

    def __init__(self, model: HybridModel, context: InferenceContext, requests: int) -> None:
        self._context, self._requests = context, requests
        parameter = next(model.parameters())
        self._like = parameter.new_empty(0)
        self._width = model.config.hidden_size
        self._slots = RunningSlots(requests)
        self._places: dict[int, tuple[RunningSlot, range]] = {}  # those of the last steps at the end
        self._rows: Tensor | None = None
        self.allocate()
        take = weakref.WeakMethod(self._take)  # the model may live longer

        def watch(_: nn.Module, __: object, output: Tensor) -> None:
            if (found := take()) is not None:
                found(output)

        weakref.finalize(self, model.decoder.register_forward_hook(watch).remove)

    def allocate(self) -> None:
        """Allocate the rows."""
        self._rows = self._like.new_empty(self._requests * KEPT_TOKENS, self._width)

    def free(self) -> None:
        """Free the rows and forget all requests."""
        self.reset()
        self._rows = None

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

    def read(self, wanted: Sequence[tuple[int, range]]) -> Tensor:
        """Return the hidden states of positions of some requests, one after the other, [n, h]."""
        rows = [_ring(self._places[request_id][0], positions) for request_id, positions in wanted]
        assert self._rows is not None, "the engine is suspended"
        return self._rows[self._index(rows)]

    def _take(self, output: Tensor) -> None:
        """Copy the last hidden states of each chunk of the staged step, [T, 1, h]."""
        if self._context.step is None or self._rows is None:
            return
        chunks, first = self._context.step.chunks, 0
        running = {chunk.request_id for chunk in chunks}
        sources, targets = [], []
        for chunk in chunks:
            new = range(max(chunk.start, chunk.end - KEPT_TOKENS), chunk.end)
            if chunk.request_id not in self._places:
                self._places[chunk.request_id] = self._slot(running), range(0)
            slot, before = self._places.pop(chunk.request_id)
            begin = before.start if before and before.start <= chunk.start <= before.stop else new.start
            self._places[chunk.request_id] = slot, range(max(begin, chunk.end - KEPT_TOKENS), chunk.end)
            sources.append(np.arange(new.start, new.stop) - chunk.start + first)
            targets.append(_ring(slot, new))
            first += chunk.length
        self._rows[self._index(targets)] = output[self._index(sources), 0]

    def _slot(self, running: set[int]) -> RunningSlot:
        """Return a free slot, if need be that of the request that was computed the longest ago."""
        if not self._slots.free_count:
            self.forget(next(one for one in self._places if one not in running))
        return self._slots.take()

    def _index(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._like.device, non_blocking=True)


def _ring(slot: RunningSlot, positions: range) -> np.ndarray:
    """Return the rows of positions of a request."""
    return slot * KEPT_TOKENS + np.arange(positions.start, positions.stop) % KEPT_TOKENS
