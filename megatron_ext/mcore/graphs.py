"""Programs that are run again and again: captured as CUDA graphs, or run as they are where there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Program = Callable[[], Tensor]


class Capture(Protocol):
    """Makes a program of what it computes once.

    Attributes:
        takes_long: So that programs are made before they are needed.
    """

    takes_long: bool

    def capture(self, run: Program) -> Program:
        """What computes the same on whatever lies in fixed places by then; its answer is always the same tensor."""


class NoGraphs:
    """Runs the Python code each time, as on a CPU."""

    takes_long = False

    def capture(self, run: Program) -> Program:
        """The very function."""
        return run


class CudaGraphs:
    """CUDA graphs that share their memory: only the answers of the step at hand are read.

    Nothing of a step that is captured may read anything back or make tensors on the host; the recorder in
    `tests/support/programs.py` sees to that without a GPU.
    """

    takes_long = True

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Program) -> Program:
        """Run it a few times beside the current stream, so that libraries have what they need; then capture it."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            answer = run()

        def replay() -> Tensor:
            graph.replay()
            return answer

        return replay
