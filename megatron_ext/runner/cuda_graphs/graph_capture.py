"""Capture of code that runs again and again: as CUDA graphs, or run as Python code on devices without graphs.

The memory that captured work reads is kept as long as its graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.ops.triton.kernel_registry import observing

Graph = Callable[[], None]
_WARM_UPS = 2


class Capture:
    """Capture of a function that is repeated; this class makes no graph and runs the Python code, as on a CPU.

    Attributes:
        takes_long: True if captures are slow, so that graphs are captured before they are needed.
    """

    takes_long = False

    def capture(self, run: Callable[[], None]) -> Graph:
        """Return a function that repeats `run` on the current contents of its static buffers."""
        return run

    def forget(self) -> None:
        """Reset after all captured graphs were dropped; later ones share no memory pool with them."""


class CudaGraphs(Capture):
    """CUDA graphs that share one memory pool; a replay overwrites temporaries of the last, never outputs.

    Captured code must not read anything back nor create tensors on the host; the recorder in
    `tests/unit_tests/support/programs.py` checks this on a CPU.

    All graphs are warmed up and captured on one stream owned by this object. cuBLAS has a workspace for each stream (32
    MiB on a device of capability 9.0), whose address graphs keep. Torch may free the workspace when a graph of that
    stream is destroyed, so all graphs of a stream are kept and dropped together.

    Args:
        device: Device that the graphs run on.
    """

    takes_long = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Graph:
        """Warm `run` up on a side stream, so that libraries allocate their buffers; then capture it.

        Other threads, such as a server's, may allocate and copy meanwhile: only calls of this thread are checked.
        """
        current, beside = torch.cuda.current_stream(), self._stream
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local"),
        ):
            run()
        return graph.replay

    def forget(self) -> None:
        """Take another pool: torch refuses a pool whose graphs are gone while any of its memory is still in use."""
        self._pool = torch.cuda.graph_pool_handle()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection within the context: finalizers might call CUDA in the capturing thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CapturedReads(TorchDispatchMode):
    """Storages that operations and kernels within the mode use and that none of them made.

    Attributes:
        storages: Storages by address.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, UntypedStorage] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Note an operation's inputs, and its results as made unless they are views of inputs."""
        self.note(tree_leaves((args, kwargs)))
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                address = one.untyped_storage().data_ptr()
                if address not in self.storages:
                    self._made.add(address)
        return found

    def note(self, arguments: Iterable[object]) -> None:
        """Note arguments of an operation or a kernel."""
        for one in arguments:
            if isinstance(one, Tensor) and (address := one.untyped_storage().data_ptr()) not in self._made:
                self.storages.setdefault(address, one.untyped_storage())


class HoldingCapture(Capture):
    """Capture whose graphs keep the tensors they read alive, except weights, which their owner may replace.

    Without this, a graph would read freed memory as soon as a cache that owns a tensor drops it: upstream's table of
    rotary angles belongs to a cache of the last 32 sequence lengths.

    Args:
        graphs: Captures the graphs.
        weight_addresses: Returns the addresses of weights, which are watched by `CudaGraphRunner.notice_new_weights`.
    """

    def __init__(self, graphs: Capture, weight_addresses: Callable[[], Collection[int]]) -> None:
        self._graphs, self._weight_addresses = graphs, weight_addresses
        self.takes_long = graphs.takes_long

    def capture(self, run: Callable[[], None]) -> Graph:
        """Return a graph that repeats `run`, see `Capture.capture`."""
        if not self.takes_long:
            return self._graphs.capture(run)
        last = CapturedReads()

        def watched() -> None:
            nonlocal last
            last = CapturedReads()  # a warm-up may make what the captured run, which is the last one, then reads
            with last, observing(lambda kernel, config, arguments: last.note(arguments.values())):
                run()

        replay = self._graphs.capture(watched)
        weights = set(self._weight_addresses())
        reads = [one for one in last.storages.values() if one.data_ptr() not in weights]

        def held(_: object = reads) -> None:  # captured work has the addresses only
            replay()

        return held

    def forget(self) -> None:
        """Reset after all captured graphs were dropped."""
        self._graphs.forget()
