"""KV-3: every write to the KV cache, caught below the engine, with the place it goes to."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.mcore.context import InferenceContext
from megatron_ext.ops.triton.kernel_registry import Config, Kernel
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


class _Catch(TorchDispatchMode):
    """Notes the operators that write to one tensor's memory: `places[i]` are indices of a flattened cache."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__()
        self._pool = pool.untyped_storage().data_ptr()
        self.places: list[np.ndarray] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() == args[1].data_ptr():
            return args[0]  # onto itself: what Triton's interpreter does with every tensor that a kernel was given
        written = _written(func)
        if written and self._is_pool(args[i] if i < len(args) else (kwargs or {}).get(name) for i, name in written):
            assert func is torch.ops.aten.index_put_.default, f"{func} writes to the KV cache"
            blocks, offsets = args[1]
            self.places.append((blocks * args[0].shape[1] + offsets).cpu().numpy())
        return func(*args, **(kwargs or {}))

    def _is_pool(self, written: Iterable[object]) -> bool:
        return any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == self._pool for t in written)


@functools.cache
def _written(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Places and names of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, one.name) for i, one in arguments if one.alias_info and one.alias_info.is_write]


@contextlib.contextmanager
def _kernels_noted(catch: _Catch) -> Iterator[None]:
    """Note what the one kernel writes that keys and values come by; it writes both."""
    launch = Kernel.launch

    def noted(kernel: Kernel, grid: tuple[int, ...], config: Config, **arguments) -> None:
        if kernel.name == "rotate_and_write":
            catch.places += [arguments["slots"].numpy().copy()] * 2
        launch(kernel, grid, config, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", noted)
        yield


class KvWrites:
    """Checks each forward of an engine: K and V of every layer go to blocks that are their request's alone.

    Args:
        context: Context of the engine.
        scheduler: Scheduler of the engine.
        shared_blocks: Blocks that a request found in the cache.
    """

    def __init__(
        self, context: InferenceContext, scheduler: Scheduler, shared_blocks: Callable[[Request], set[int]]
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._shared_blocks = shared_blocks
        self.count = 0  # tokens written to blocks
        self.dropped = 0  # tokens whose KV is in a shared block already

    def watch(self, forward: Callable[[], Tensor]) -> Tensor:
        """Run `forward` under watch."""
        catch = _Catch(self._context.memory_buffer)
        with catch, _kernels_noted(catch):
            result = forward()
        assert len(catch.places) == 2 * self._context.plan.shape.attention_layers
        protected = self._protected()
        for places in catch.places:
            self._check(places, protected)
        return result

    def _protected(self) -> set[int]:
        """Blocks whose contents another request could read, now or later, or that are complete."""
        pool, queues = self._scheduler.cache.pool, self._scheduler.queues
        protected = set(self._scheduler.cache.unused)
        for request in [*queues.running, *queues.paused]:
            protected |= set(request.block_table[: request.computed_end // self._context.block_size_tokens])
            protected |= self._shared_blocks(request)
            protected |= {block for block in request.block_table if pool.references(block) > 1}
        return protected

    def _check(self, places: np.ndarray, protected: set[int]) -> None:
        size, dummy = self._context.block_size_tokens, self._context.plan.geometry.blocks
        requests = {request.request_id: request for request in self._scheduler.queues.running}
        chunks = self._context.step.chunks
        tokens = [(requests[chunk.request_id], p) for chunk in chunks for p in range(chunk.start, chunk.end)]
        for place, (request, position) in zip(places.tolist(), tokens, strict=True):
            block, offset = divmod(place, size)
            own = request.block_table[position // size]
            name = f"token {position} of request {request.request_id}"
            assert offset == position % size, f"{name} is written to place {offset} of its block"
            if block == dummy:
                assert own in protected, f"the KV of {name} is lost"
                self.dropped += 1
            else:
                assert block not in protected, f"{name} is written to block {block}, which is shared or cached"
                assert block == own, f"{name} is written to block {block}, not to its own {own}"
                self.count += 1
