"""megatron-core 0.19.2 beside us: the same shapes, types, prompts and calls, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.gpu.notes import Page
from benchmarks.gpu.processes import ROOT, run
from benchmarks.gpu.shapes import LARGE, WORK
from benchmarks.gpu.work import RequestSpec

NAME = "megatron-core 0.19.2"
WIDE = "megatron-core 0.19.2, fp32 states"
STATES = {NAME: "bfloat16", WIDE: "float32"}
"""Its default is states of the parameters' type; ours are of fp32. It is measured with both."""


def given_path() -> list[str]:
    """Entries of PYTHONPATH."""
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def run_peer(name: str, folder: Path, seconds: float, figures: Path) -> Page:
    """Measure it.

    Args:
        name: Name in `STATES`.
        folder: Folder with megatron, mamba_ssm and causal_conv1d.
        seconds: Available time.
        figures: File that it writes to.
    """
    job = figures.with_suffix(".job.json")
    RequestSpec(LARGE.to_dict(), WORK, STATES[name], seconds, str(figures)).write(job)
    path = os.pathsep.join([str(folder.resolve()), str(ROOT), *given_path()])
    command = [sys.executable, "-m", "benchmarks.gpu.megatron_0_19", str(job)]
    return run(command, figures, seconds, {"PYTHONPATH": path})
