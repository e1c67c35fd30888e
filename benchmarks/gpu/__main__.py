"""GPU benchmark in one script of under ten minutes (CU-8): correctness first, then speed.

Run: `python -m benchmarks.gpu` on a machine with a CUDA device (`--quick`: small models and few tokens, on a CPU too,
so that the script itself is tried). Each part is a process of its own, and writes its figures as they come:

- of each recurrent kind, correctness of a small model in fp32 (`right.py` lists the checks), then a hybrid of 2
  billion parameters, random weights, bf16: decode tokens a second of 1, 8 and 64 requests by graphs and eager, the
  share of it in which the device idles, the phases of the host's time of a step, and times to the first token, cold
  and after a cached prefix of 8k and 32k tokens, one and eight requests at once;
- each operator at those sizes, beside plain torch;
- megatron-core 0.19.2 with the Mamba-2 model, where `--megatron-0-19` (or MEGATRON_0_19) names a folder that has it:
  docs/cuda.md says how to make one.

Exit code 1 if something is not right or a part did not come to its end; speed is only told. What there was no time for
is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu import peer, tables
from benchmarks.gpu.notes import Page
from benchmarks.gpu.part import OPERATORS
from benchmarks.gpu.processes import ROOT, run
from benchmarks.gpu.shapes import KINDS

LEAST = {**dict.fromkeys(KINDS, 50.0), OPERATORS: 40.0, peer.NAME: 190.0, peer.WIDE: 15.0}
"""Seconds that are kept for a part while earlier ones run. The peer tunes its kernels when they are first used: fifty
are compiled then, which its second part finds done."""


def main() -> int:
    """Measure and print.

    Returns:
        The exit code.
    """
    options = arguments().parse_args()
    if not torch.cuda.is_available() and not options.quick:
        print("benchmarks.gpu: no CUDA device is here; --quick tries the script itself", file=sys.stderr)
        return 2
    if torch.cuda.is_available():
        os.environ.setdefault("MEGATRON_EXT_CPP", "off")  # a minute for operators of a CPU, which are not measured
    console = Console(highlight=False, width=160)
    with tempfile.TemporaryDirectory() as folder:
        pages = measure(options, Path(folder), console)
    tables.show(console, pages)
    if options.megatron_0_19 is None:
        console.print(f"{peer.NAME}: not measured; --megatron-0-19 names a folder that has it")
    return 0 if all(is_well(page) for page in pages.values()) else 1


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="so little that only errors show")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which everything has ended")
    parser.add_argument("--only", nargs="+", choices=tuple(LEAST), help="these parts; the rest is not measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--figures", type=Path, metavar="FILE.json", help="write what is found there as it comes, too")
    parser.add_argument(
        "--megatron-0-19",
        type=Path,
        metavar="DIR",
        default=os.environ.get("MEGATRON_0_19"),
        help="a folder with megatron-core 0.19.2 and what it needs, unpacked; default: $MEGATRON_0_19",
    )
    return parser


def measure(options: argparse.Namespace, folder: Path, console: Console) -> dict[str, Page]:
    """Run the parts one after the other, each with the time that is not reserved for later ones."""
    end = time.monotonic() + 60 * options.minutes
    peers = [] if options.megatron_0_19 is None or options.quick else [peer.NAME, peer.WIDE]
    parts = [name for name in (*KINDS, OPERATORS, *peers) if name in (options.only or LEAST)]
    pages: dict[str, Page] = {}
    for place, name in enumerate(parts):
        seconds = end - time.monotonic() - sum(LEAST[later] for later in parts[place + 1 :])
        console.print(f"{name}: for at most {max(0.0, seconds):.0f} s")
        pages[name] = run_part(name, seconds, folder, options)
        keep(options.figures, pages)
    return pages


def run_part(name: str, seconds: float, folder: Path, options: argparse.Namespace) -> Page:
    """Run one of our parts, or the peer."""
    figures = folder / f"{name}.json"
    if name in (peer.NAME, peer.WIDE):
        return peer.run_peer(name, Path(options.megatron_0_19), seconds, figures)
    command = [sys.executable, "-m", "benchmarks.gpu.part", name, "--figures", str(figures)]
    command += ["--seconds", str(seconds), "--threads", str(options.threads), *["--quick"] * options.quick]
    return run(command, figures, seconds, {"PYTHONPATH": os.pathsep.join([str(ROOT), *peer.given_path()])})


def keep(path: Path | None, pages: Mapping[str, Page]) -> None:
    """Write what there is, if that is asked for."""
    if path is not None:
        path.write_text(json.dumps(pages, indent=1), "utf-8")


def is_well(page: Page) -> bool:
    """Return whether a part ran to its end and its correctness checks passed."""
    return not page["failed"] and bool(page["found"].get("ok", True))


if __name__ == "__main__":
    sys.exit(main())
