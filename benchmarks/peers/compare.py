"""All peers over the same work, one after the other, and each goal as met or missed by how much.

Run: `make bench`, or `python -m benchmarks.peers.compare [--quick]`. transformers comes with this project; vLLM is
measured where the variable VLLM_PYTHON names a Python that has it (see README.md here). Compare figures of one run of a
quiet machine only: a neighbour on a core costs vLLM most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers.work import QUICK, Size

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"ours": "ours", "transformers": "transformers_script", "vllm": "vllm_engine"}
Result = Mapping[str, object]


@dataclass(frozen=True)
class Goal:
    """A ratio that is to be reached.

    Attributes:
        name: What is compared.
        ratio: Ours over theirs, or the other way round.
        bound: The goal.
        is_most: Whether smaller is better.
    """

    name: str
    ratio: float
    bound: float
    is_most: bool

    def verdict(self) -> str:
        """Met, or missed by how much."""
        is_met = self.ratio <= self.bound if self.is_most else self.ratio >= self.bound
        factor = self.ratio / self.bound if self.is_most else self.bound / self.ratio
        return "met" if is_met else f"missed by {100 * (factor - 1):.0f} %"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="so little that only errors show")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", metavar="DIR", help="where results stay; default: nowhere")
    arguments = parser.parse_args()
    from benchmarks.nemotron_shaped import build_reference  # the rest of this file needs no torch

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = Path(scratch) / "model"
        build_reference().save_pretrained(model)
        results = {name: measured(name, model, folder, arguments) for name in MODULES if python_of(name)}
    if python_of("vllm") is None:
        console.print("VLLM_PYTHON is not set: vLLM is not measured, and goals beside it are not judged")
    size = QUICK if arguments.quick else Size()
    console.print(times_table(results, size))
    console.print(goals_table(list(goals(results, size))))


def python_of(name: str) -> str | None:
    """The interpreter that has this peer; None if nobody said."""
    return os.environ.get("VLLM_PYTHON") if name == "vllm" else sys.executable


def measured(name: str, model: Path, folder: Path, arguments: argparse.Namespace) -> Result:
    """Run one peer in a process of its own."""
    out = folder / f"{name}.json"
    command = [python_of(name), "-m", f"benchmarks.peers.{MODULES[name]}", model, out, arguments.threads]
    threads = {"OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
    environment = {**os.environ, **threads, "PYTHONPATH": str(ROOT)}
    subprocess.run([*map(str, command), *(["quick"] if arguments.quick else [])], cwd=ROOT, env=environment, check=True)
    return json.loads(out.read_text("utf-8"))


def times_table(results: Mapping[str, Result], size: Size) -> Table:
    """What was measured."""
    table = Table("work", "peer", "first ttft, ms", "later, ms", "worst, ms", "generated/s", "skipped of prompt tokens")
    for case in case_names(size):
        for name, result in results.items():
            one = result[case]
            times = (f"{1e3 * one[key]:.0f}" for key in ("first_ttft", "later_ttft", "worst_ttft"))
            counts = f"{one['skipped_tokens']:,} of {one['prompt_tokens']:,}"
            table.add_row(case, name, *times, f"{one['generated_per_second']:.0f}", counts)
    for name, result in results.items():
        turns = ", ".join(f"{1e3 * turn['ttft']:.0f}" for turn in result["chat"])
        computed = f"{sum(turn['computed'] for turn in result['chat']):,} computed"
        table.add_row("chat, ttft by turn", name, turns, "", "", "", computed)
    return table


def case_names(size: Size) -> list[str]:
    """All but the warm-up and the chat."""
    return [f"shared {p}, {n} at once" for p in size.prefixes for n in (1, 8)] + ["unique, 8 at once"]


def goals(results: Mapping[str, Result], size: Size) -> Iterator[Goal]:
    """Those that the peers that were measured can judge."""
    ours, theirs = results["ours"], results.get("vllm")
    if theirs is None:
        return

    def ratio(case: str, key: str) -> float:
        return ours[case][key] / theirs[case][key]

    rates = dict(zip(size.prefixes, (1.3, 1.1), strict=False))
    for prefix in size.prefixes:
        alone, together = f"shared {prefix}, 1 at once", f"shared {prefix}, 8 at once"
        yield Goal(f"cold ttft, {prefix}, over vLLM's", ratio(alone, "first_ttft"), 0.8, True)
        yield Goal(
            f"{together}: generated/s over vLLM's", ratio(together, "generated_per_second"), rates[prefix], False
        )
        yield Goal(f"{together}: later ttft over vLLM's", ratio(together, "later_ttft"), 1.0, True)
    unique = "unique, 8 at once"
    yield Goal(f"{unique}: generated/s over vLLM's", ratio(unique, "generated_per_second"), 1.0, False)
    for turn, (one, other) in enumerate(zip(ours["chat"], theirs["chat"], strict=True), 1):
        yield Goal(f"chat, turn {turn}: ttft over vLLM's", one["ttft"] / other["ttft"], 0.9, True)


def goals_table(judged: list[Goal]) -> Table:
    """Met or missed."""
    table = Table("goal", "measured", "wanted", "")
    for goal in judged:
        sign = "at most" if goal.is_most else "at least"
        table.add_row(goal.name, f"{goal.ratio:.2f}", f"{sign} {goal.bound:.2f}", goal.verdict())
    return table


if __name__ == "__main__":
    main()
