"""CUDA graphs of the fake device: what was captured is run again with the very tensors of the capture."""

from __future__ import annotations

from tests.unit_tests.support.fake_cuda import streams, watching
from tests.unit_tests.support.replay import Tape


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    made = replayed = 0

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: Tape | None = None

    def replay(self) -> None:
        assert self.tape is not None, "nothing was captured"
        CUDAGraph.replayed += 1
        with watching.unwatched():
            self.tape.replay()

    def reset(self) -> None:
        self.tape = None


class graph:  # noqa: N801 - its name in torch
    """`torch.cuda.graph`."""

    def __init__(self, cuda_graph: CUDAGraph, pool: object = None, stream: object = None, **_: object) -> None:
        self._graph, self._beside = cuda_graph, streams.Stream()

    def __enter__(self) -> None:
        streams.synchronize()
        assert not watching.STATE.is_capturing, "a graph is being captured"
        self._graph.tape = Tape()
        self._beside.__enter__()
        self._graph.tape.__enter__()
        watching.STATE.tape = self._graph.tape

    def __exit__(self, *why: object) -> None:
        watching.STATE.tape = None
        assert self._graph.tape is not None
        self._graph.tape.__exit__(*why)
        self._beside.__exit__(*why)
        CUDAGraph.made += 1


def graph_pool_handle() -> tuple[int, int]:
    return (0, 1)
