"""Eviction policies and placements of opportunistic snapshots on whole recorded traces, and on halves of them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.cases import Run, case
from megatron_ext.simulation.cached_models import MODELS
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.sweep import PLACEMENTS, Batch, grid, run_point
from megatron_ext.simulation.trace import Turn, cut, longest_request, root_sessions
from megatron_ext.simulation.trace_formats.sessions import SessionOptions

FOLDER = "MEGATRON_EXT_TRACES"
QUICK = Path(__file__).parent / "traces"
SEED = 36  # of the halves and of the subset
SAME_CONVERSATION = 1024  # equal first tokens of prompts, in a trace that does not name sessions


@dataclasses.dataclass(frozen=True)
class Cell:
    """Result of one setting on a trace or a part of it, as it is written to a file.

    Attributes:
        trace: Name of the trace.
        part: `all`, or a half of the sessions.
        common: Whether sessions have common prefixes.
        memory_gib: Memory of blocks and snapshots.
        share: Share of it for snapshots.
        policy: Eviction policy.
        placement: Placement of opportunistic snapshots.
        requests: Number of requests.
        prompt_tokens: Number of prompt tokens.
        skipped_tokens: Number of skipped ones.
        ttft_p50: Median of the simulated time to first token, in seconds.
        ttft_p90: 90th percentile of it.
        cpu_seconds: CPU time of the simulation.
    """

    trace: str
    part: str
    common: bool
    memory_gib: float
    share: float
    policy: str
    placement: str
    requests: int
    prompt_tokens: int
    skipped_tokens: int
    ttft_p50: float
    ttft_p90: float
    cpu_seconds: float


@case("simulation", quick={"memories": (16.0,), "policies": ("lru",), "sessions": 4})
def policies(
    run: Run,
    memories: tuple = (64.0, 256.0),
    share: float = 0.5,
    policies: tuple = ("lru", "flops"),
    placements: tuple = PLACEMENTS,
    rate: float = 0.1,
    sessions: int = 0,
    common: bool = False,
    traces: tuple = ("all",),
    output: str = "",
) -> None:
    """Share of prompt tokens skipped on the traces of the folder MEGATRON_EXT_TRACES, whole and in halves of sessions.

    `sessions` takes so many of each trace, by a seed; 0 takes all. `common` gives sessions common prefixes. `output` is
    a file of JSON lines, to which results are added; simulation/policy_figures.py makes a table and a plot of it.
    """
    folder = QUICK if run.is_quick or FOLDER not in os.environ else Path(os.environ[FOLDER])
    parts: list[tuple[str, str, list[Turn]]] = []
    for path in sorted(one for one in folder.iterdir() if {".json", ".jsonl"} & set(one.suffixes)):
        name = path.name.partition(".")[0]
        if traces in (("all",), ()) or name in traces:
            turns = read_trace(path, sessions=SessionOptions(rate, shares_prefixes=common))
            parts += [(name, part, found) for part, found in parts_of(turns, sessions).items()]
    settings = grid(memories, [share], [64], policies, ["kernel"], placements)
    with tqdm(total=len(parts) * len(settings), unit="run", disable=None) as progress:
        for name, part, turns in parts:
            model = MODELS["nemotron-h-8b"].reaching(longest_request(turns))
            for one in settings:
                began = time.process_time()
                point = run_point(turns, model, one, Batch(), Machine())
                cell = Cell(
                    name,
                    part,
                    common,
                    one.memory_gib,
                    share,
                    one.policy,
                    one.placement,
                    point.requests,
                    point.prompt_tokens,
                    point.skipped_tokens,
                    round(point.ttft_p50, 4),
                    round(point.ttft_p90, 4),
                    round(time.process_time() - began, 2),
                )
                _report(run, cell, output)
                progress.update()


def _report(run: Run, cell: Cell, output: str) -> None:
    column, figures = f"{cell.policy}, {cell.placement}", {"prompt tokens": cell.prompt_tokens}
    figures |= {column: cell.skipped_tokens / cell.prompt_tokens, f"{column}: CPU s": cell.cpu_seconds}
    run.row(f"{cell.trace}, {cell.part}, {cell.memory_gib:g} GiB", figures)
    if output:
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(cell)) + "\n")


def parts_of(turns: Sequence[Turn], sessions: int) -> dict[str, list[Turn]]:
    """Return the turns of all sessions, and of two halves of the sessions; a sub-agent is in its parent's half."""
    roots = _conversations(turns)
    names = sorted(set(roots))
    random.Random(SEED).shuffle(names)
    kept = names[:sessions] if sessions else names
    first, second = set(kept[: len(kept) // 2]), set(kept[len(kept) // 2 :])
    sides = {"all": first | second, "half A": first, "half B": second}
    return {
        name: [turn for turn, root in zip(turns, roots, strict=True) if root in side] for name, side in sides.items()
    }


def _conversations(turns: Sequence[Turn]) -> list[int]:
    """Return the number of each turn's session; in a trace without sessions, of those with equal first tokens."""
    roots = root_sessions(turns)
    if len(set(roots)) < len(turns):
        return roots
    starts = [cut(turn.prompt, SAME_CONVERSATION) for turn in turns]
    numbers = {start: number for number, start in enumerate(dict.fromkeys(starts))}
    return [numbers[start] for start in starts]
