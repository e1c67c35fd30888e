"""Part of the benchmark in its own process: `python -m benchmarks.gpu.part NAME --figures FILE --seconds S`.

What a kernel does to a device in one part costs no other part anything.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.gpu import operators, right, speed
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.shapes import KINDS, LARGE, QUICK, SMALL, WORK, model_config
from benchmarks.measuring import header
from megatron_ext.mcore import platform

OPERATORS = "operators"
PARTS = (*KINDS, OPERATORS)


def main() -> int:
    """Measure, and write it down.

    Returns:
        The exit code: 0 if every piece came to its end, and what has to be right is.
    """
    options = arguments().parse_args()
    torch.set_num_threads(options.threads)
    notes = Notes(options.figures, options.seconds)
    notes.attempt("start", lambda: {"device": header(platform.device(), torch.bfloat16)})
    run(options.part, notes, quick=options.quick)
    is_right = bool(notes.page["found"].get("ok", True))
    return 0 if is_right and not notes.page["failed"] else 1


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    return parser


def run(part: str, notes: Notes, *, quick: bool) -> None:
    """A part."""
    device = platform.device()
    if part == OPERATORS:
        operators.measure(notes, device, quick)
        return
    right.check(part, device, notes)
    work, like = (QUICK, SMALL) if quick else (WORK, LARGE)
    made: list[speed.Speed] = []

    def model() -> dict[str, float | str]:
        made.append(speed.Speed(model_config(part, like), work, device, notes))
        return {}

    if notes.attempt("model", model):
        made[0].measure()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a device that no longer answers would hold up what is taken apart at an end
