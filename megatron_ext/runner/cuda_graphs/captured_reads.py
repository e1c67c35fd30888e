"""Memory that captured work reads: graphs keep addresses only, so it is kept alive as long as the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.ops.triton.kernel_registry import observing_arguments
from megatron_ext.runner.cuda_graphs.graph_capture import Capture, Graph


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


class HeldGraph:
    """Graph that keeps the storages that it reads alive.

    Args:
        replay: Repeats the captured work.
        reads: Storages that it reads.
    """

    def __init__(self, replay: Graph, reads: Collection[UntypedStorage]) -> None:
        self._replay, self._reads = replay, reads

    def __call__(self) -> None:
        """Repeat the captured work."""
        self._replay()


class HoldingCapture:
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
            with last, observing_arguments(last.note):
                run()

        replay = self._graphs.capture(watched)
        weights = set(self._weight_addresses())
        return HeldGraph(replay, [one for one in last.storages.values() if one.data_ptr() not in weights])

    def forget(self) -> None:
        """Reset after all captured graphs were dropped."""
        self._graphs.forget()
