"""Skipped tokens of recorded traces, by the simulator: counts, which are the same on every machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.cases import Run, case
from benchmarks.simulation.truth import TRACES
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.replay import simulate
from megatron_ext.simulation.settings import MODELS, Settings

FOLDER = "MEGATRON_EXT_TRACES"
SHARES = {"shared": None, "half fixed": 0.5}  # of snapshots; None: blocks and snapshots share the memory


@case("baseline", quick={"memories": (16.0,)})
def traces(run: Run, memories: tuple = (16.0, 32.0)) -> None:
    """Skipped tokens with `lru` and even placement, in memory that is shared or split in halves.

    The folder MEGATRON_EXT_TRACES has the traces; without it, the excerpts in the repository are played.
    """
    folder = TRACES if run.is_quick or FOLDER not in os.environ else Path(os.environ[FOLDER])
    for path in sorted(one for one in folder.iterdir() if ".jsonl" in one.suffixes):
        turns = read_trace(path)
        for memory in memories:
            for name, share in SHARES.items():
                begun = time.perf_counter()
                outcome = simulate(turns, MODELS["nemotron-h-8b"], Settings(memory, share))
                run.row(
                    f"{path.name.partition('.')[0]}, {memory:g} GiB, {name}",
                    {
                        "prompt tokens": sum(outcome.prompt),
                        "skipped tokens": sum(outcome.skipped),
                        "refused": outcome.refused,
                        "wall, s": time.perf_counter() - begun,
                    },
                )
