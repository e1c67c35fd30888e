"""Drawing 64 tokens beside one softmax over the same logits, in one run that takes turns.

Run: `python -m benchmarks.sampling` (`--threads 2`). Every backend there is; a goal is at most so many softmaxes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measuring import header, keep_figures, part_arguments
from megatron_ext.ops.sampling import SAMPLING, sample_tokens, sampling_metadata

Name = TypeVar("Name", bound=Hashable)
ROWS = 64
VOCABULARIES = (4_096, 32_000, 131_072)
LOGITS = {"like a model's": 2.0, "nearly flat": 0.3, "peaked": 6.0}  # their standard deviation
WISHES: dict[str, dict[str, float]] = {
    "neither": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50 and top_p 0.9": {"top_k": 50, "top_p": 0.9},
}
GOALS = {"neither": 2.0, "top_p 0.9": 8.0}


def main() -> None:
    """Measure and print."""
    parser = part_arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[int, dict[str, float]] = {}
    repeats = 1 if options.quick else options.repeats
    table = Table("words", "logits", "softmax, ms", "asked for", "backend", "ms", "softmaxes", "goal")
    for vocabulary in VOCABULARIES:
        for shape, deviation in LOGITS.items():
            logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(1)) * deviation
            times = measure(logits, repeats)
            add_rows(table, shape, vocabulary, times)
            note(found.setdefault(vocabulary, {}), times)
    print(header(torch.device("cpu"), torch.float32))
    Console(width=120).print(table)
    keep_figures(options, found)


Times = dict[tuple[str, str], float]  # seconds, by wish and backend; one is the softmax


@torch.inference_mode()
def measure(logits: Tensor, repeats: int) -> Times:
    """Every wish by every backend, and the softmax."""
    room = torch.empty_like(logits)  # no page of it is new
    work: dict[tuple[str, str], Callable[[], Tensor]] = {("softmax", ""): lambda: torch.softmax(logits, -1, out=room)}
    for row_metadata, parameters in WISHES.items():
        for backend in SAMPLING.names:
            work[row_metadata, backend] = draws(logits, backend, **parameters)
    return fastest(work, repeats)


def note(found: dict[str, float], times: Times) -> None:
    """Softmaxes that each wish takes by the backend that is preferred here; the worst of the shapes of logits."""
    for row_metadata in WISHES:
        ratio = times[row_metadata, SAMPLING.names[0]] / times["softmax", ""]
        found[row_metadata] = max(found.get(row_metadata, 0.0), ratio)


def add_rows(table: Table, shape: str, vocabulary: int, times: Times) -> None:
    """Add a row to the table for each option and backend."""
    softmax = times["softmax", ""]
    for (row_metadata, backend), duration in times.items():
        if row_metadata == "softmax":
            continue
        ratio = duration / softmax
        goal = (
            f"{'met' if ratio <= GOALS[row_metadata] else 'missed'} ({GOALS[row_metadata]:g})"
            if row_metadata in GOALS
            else ""
        )
        named = (f"{vocabulary:,}", shape, f"{1e3 * softmax:.2f}", row_metadata, backend)
        table.add_row(*named, f"{1e3 * duration:.2f}", f"{ratio:.1f}", goal)
    table.add_section()


def draws(logits: Tensor, backend: str, top_k: float = 0, top_p: float = 0.0) -> Callable[[], Tensor]:
    """A call that draws a token of each row."""
    uniform = torch.rand(ROWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()
    batch = sampling_metadata([0.8] * ROWS, [int(top_k)] * ROWS, [top_p] * ROWS, uniform)

    def call() -> Tensor:
        with SAMPLING.forced(backend):
            return sample_tokens(logits, batch)

    return call


def fastest(work: Mapping[Name, Callable[[], Tensor]], repeats: int) -> dict[Name, float]:
    """Seconds of the fastest call of each, taking turns."""
    times = dict.fromkeys(work, float("inf"))
    for _ in range(repeats + 1):
        for name, call in work.items():
            start = clock()
            call()
            times[name] = min(times[name], clock() - start)
    return times


def clock() -> float:
    """Seconds: of this thread where there is one, which says more on a machine that others use; else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


if __name__ == "__main__":
    main()
