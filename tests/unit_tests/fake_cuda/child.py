"""Program of this folder's tests that runs lives and faults on the fake device in its own process, with JSON output.

`python -m tests.unit_tests.support.fake_cuda -m tests.unit_tests.fake_cuda.child FILE [LIVES]`
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path

import torch

from megatron_ext.ops.triton import kernel_registry
from tests.unit_tests.fake_cuda import faults, lives
from tests.unit_tests.support.fake_cuda import watching
from tests.unit_tests.support.fake_cuda.graphs import CUDAGraph


class Watch:
    """Notes while steps run, all of them together."""

    def __init__(self) -> None:
        self.notes: dict[watching.Note, int] = {}

    def __enter__(self) -> None:
        self._within = watching.watched()
        self._new = self._within.__enter__()

    def __exit__(self, *why: object) -> None:
        self._within.__exit__(*why)
        for one, count in self._new.items():
            self.notes[one] = self.notes.get(one, 0) + count


def live(name: str) -> dict[str, object]:
    """Answers of one life, with the waits of its steps and the number of replayed graphs."""
    watch, before = Watch(), CUDAGraph.replayed
    with kernel_registry.watch() as launches:
        found = (lives.LIVES | lives.KERNEL_LIVES)[name](watch)
    return found | {
        "notes": [[*one, count] for one, count in watch.notes.items()],
        "replayed": CUDAGraph.replayed - before,
        "kernels": sorted({launch.kernel for launch in launches}),
    }


def main() -> None:
    """Run all, or the lives that are named alone."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    path, *names = sys.argv[1:]
    found = {"lives": {name: live(name) for name in names or lives.LIVES}}
    if not names:
        found["faults"] = {name: faults.outcome(work) for name, work in faults.FAULTS.items()}
    Path(path).write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
