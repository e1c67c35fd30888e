"""Programs that are run again and again: captured as CUDA graphs, or run as they are where there are none."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

Program = Callable[[], None]
_WARM_UPS = 2


class Capture(Protocol):
    """Makes a program of what it computes once.

    Attributes:
        takes_long: So that programs are made before they are needed.
    """

    takes_long: bool

    def capture(self, run: Program) -> Program:
        """What computes the same on whatever lies in fixed places by then, and leaves its answer in others."""

    def forget(self) -> None:
        """All programs made so far have been dropped; those to come share nothing with them."""


class NoGraphs:
    """Runs the Python code each time, as on a CPU."""

    takes_long = False

    def capture(self, run: Program) -> Program:
        """The very function."""
        return run

    def forget(self) -> None:
        """Nothing was kept."""


class CudaGraphs:
    """CUDA graphs that share their memory: what a program makes is overwritten by the next, its answers are elsewhere.

    Nothing of a step that is captured may read anything back or make tensors on the host; the recorder in
    `tests/unit_tests/support/programs.py` sees to that on a CPU.

    All are warmed up and captured on one stream of this object's own. cuBLAS has a workspace for each stream (32 MiB on
    a device of capability 9.0), whose address graphs keep; torch may free it when a graph of that stream is destroyed,
    so graphs of a stream live and go together.

    Args:
        device: Where they run.
    """

    takes_long = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Program) -> Program:
        """Run it a few times beside the current stream, so that libraries have what they need; then capture it.

        Other threads may allocate and copy meanwhile, a server's among them: only this thread's calls are watched.
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
        """Take another pool: torch refuses one whose graphs are gone while any of its memory is still in use."""
        self._pool = torch.cuda.graph_pool_handle()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Within it Python collects no garbage, whose finalizers might call CUDA in the thread that captures."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
