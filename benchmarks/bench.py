"""Measurements for the speed goals, one part after the other, with the margin by which each goal is met or missed.

Run: `make bench`, or `python -m benchmarks.bench [--quick]`. Each part is a process of its own and writes its figures.
transformers comes with this project; vLLM is measured where the variable VLLM_PYTHON names a Python that has it (see
`benchmarks/peers/README.md`). Compare figures of one run on a quiet machine only: a neighbour costs vLLM most.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.goals import Figures, Goal, goals
from benchmarks.peers.work import QUICK, Size

ROOT = Path(__file__).resolve().parents[1]
PEERS = {"ours": "ours", "transformers": "transformers_script", "vllm": "vllm_engine"}
OWN = (
    "decode_context",
    "recurrent_kinds",
    "host_path",
    "host_step",
    "sampling",
    "paged_attention",
    "profile",
    "speculation",
)


def main() -> int:
    """Measure, print, and say by the exit code whether every part came to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="so little that only errors show; no figure says anything")
    parser.add_argument("--threads", type=int, help="of each part; default: 2, and 1 with --quick")
    parser.add_argument("--keep", metavar="DIR", help="where figures stay; default: nowhere")
    parser.add_argument("--only", nargs="+", choices=(*PEERS, *OWN), help="these parts; the rest is not measured")
    options = parser.parse_args()
    console = Console(highlight=False, width=120)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        threads = options.threads or (1 if options.quick else 2)  # two that spin are slow beside other work
        runs = Runs(folder, threads, is_quick=options.quick, console=console)
        wanted = [name for name in (*PEERS, *OWN) if name in (options.only or (*PEERS, *OWN))]
        measure(wanted, runs, Path(scratch) / "model")
    size = QUICK if options.quick else Size()
    if any(name in runs.results for name in PEERS):
        console.print(peers_table({name: runs.results[name] for name in PEERS if name in runs.results}, size))
    if options.quick:
        console.print("--quick: everything has run, and none of these figures says anything")
    console.print(goals_table(goals(runs.results, size.prefixes)))
    console.print(parts_table(runs.notes))
    return 1 if runs.failed else 0


class Runs:
    """Parts that have been run.

    Args:
        folder: Folder of their figures.
        threads: Threads of each run.
        is_quick: True if they are to do little.
        console: Told what happens.

    Attributes:
        results: Figures by part.
        notes: Seconds, and cores that other processes used meanwhile, by part.
        failed: Parts that did not come to their end.
    """

    def __init__(self, folder: Path, threads: int, *, is_quick: bool, console: Console) -> None:
        self._folder, self._threads, self._is_quick, self._console = folder, threads, is_quick, console
        self.results: dict[str, Figures] = {}
        self.notes: dict[str, tuple[float, float]] = {}
        self.failed: list[str] = []

    def run(self, name: str, module: str, python: str, *arguments: object) -> None:
        """Run a part, and read what it found."""
        out = self._folder / f"{name}.json"
        out.unlink(missing_ok=True)
        command = [python, "-m", module, "--figures", out, "--threads", self._threads, *arguments]
        threads = {"OMP_NUM_THREADS": str(self._threads), "MKL_NUM_THREADS": str(self._threads)}
        environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        before = Clock()
        quick = ["--quick"] if self._is_quick else []
        ended = subprocess.run([*map(str, command), *quick], cwd=ROOT, env=environment, check=False)
        self.notes[name] = before.since()
        if out.exists():
            self.results[name] = json.loads(out.read_text("utf-8"))
        if ended.returncode != 0:
            self.failed.append(name)
            self._console.print(
                f"{name} has failed with exit code {ended.returncode}; its goals are judged as far as it got"
            )

    def say(self, text: str) -> None:
        """Progress."""
        self._console.print(text)


class Clock:
    """Now: wall time, and seconds that cores were busy."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.perf_counter(), _busy_seconds(), _child_seconds()

    def since(self) -> tuple[float, float]:
        """Seconds since the start, and how many cores other processes kept busy on average."""
        wall = time.perf_counter() - self._wall
        others = (_busy_seconds() - self._busy) - (_child_seconds() - self._own)
        return wall, max(0.0, others / wall)


def _busy_seconds() -> float:
    """CPU seconds of all cores and all processes since the machine started (Linux)."""
    fields = [int(field) for field in Path("/proc/stat").read_text("utf-8").splitlines()[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft, stolen = fields
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(wanted: list[str], runs: Runs, model: Path) -> None:
    """Run these parts."""
    if any(name in PEERS for name in wanted):
        runs.say("making the model that peers share")
        command = [sys.executable, "-m", "benchmarks.nemotron_shaped", str(model)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONWARNINGS": "ignore"}, check=True)
    for number, name in enumerate(wanted, 1):
        python = os.environ.get("VLLM_PYTHON") if name == "vllm" else sys.executable
        if not python:
            runs.say(f"[{number}/{len(wanted)}] vllm: VLLM_PYTHON is not set, so it is not measured")
            continue
        runs.say(f"[{number}/{len(wanted)}] {name}")
        if name in PEERS:
            runs.run(name, f"benchmarks.peers.{PEERS[name]}", python, "--model", model)
        else:
            runs.run(name, f"benchmarks.{name}", python)


def peers_table(results: Mapping[str, Figures], size: Size) -> Table:
    """Table of the figures measured for each peer."""
    table = Table("work", "peer", "first ttft, ms", "later, ms", "worst, ms", "generated/s", "skipped of prompt tokens")
    cases = [f"shared {p}, {n} at once" for p in size.prefixes for n in (1, 8)] + ["unique, 8 at once"]
    for case in cases:
        for name, result in results.items():
            if case in result:
                table.add_row(case, name, *_cells(result[case]))
    for name, result in results.items():
        if "chat" in result:
            turns = ", ".join(f"{1e3 * turn['ttft']:.0f}" for turn in result["chat"])
            computed = f"{sum(turn['computed'] for turn in result['chat']):,} computed"
            table.add_row("chat, median ttft by turn", name, turns, "", "", "", computed)
    return table


def _cells(one: Mapping[str, Any]) -> list[str]:
    times = [f"{1e3 * one[key]:.0f}" for key in ("first_ttft", "later_ttft", "worst_ttft")]
    return [*times, f"{one['generated_per_second']:.0f}", f"{one['skipped_tokens']:,} of {one['prompt_tokens']:,}"]


def goals_table(judged: Iterable[Goal]) -> Table:
    """Met or missed."""
    table = Table("goal", "measured", "wanted", "")
    for goal in judged:
        measured = "" if goal.measured is None else f"{goal.measured:,.{0 if goal.measured >= 100 else 2}f}"
        wanted = f"{'at most' if goal.is_upper_bound else 'at least'} {goal.bound:,g}"
        table.add_row(goal.name, measured, wanted, goal.verdict())
    return table


def parts_table(notes: Mapping[str, tuple[float, float]]) -> Table:
    """Table of how long each part took and how many cores other processes used meanwhile."""
    table = Table("part", "seconds", "cores that others used")
    for name, (seconds, others) in notes.items():
        table.add_row(name, f"{seconds:.0f}", f"{others:.2f}")
    table.add_row("together", f"{sum(seconds for seconds, _ in notes.values()):.0f}", "")
    return table


if __name__ == "__main__":
    sys.exit(main())
