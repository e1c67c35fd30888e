"""Eviction policies and placements of opportunistic snapshots on whole recorded traces, and on halves of them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from benchmarks.cases import Run, case
from megatron_ext.simulation.cached_models import MODELS, SimulatedModel
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.sweep import Batch, Point, Settings, grid, run_point
from megatron_ext.simulation.sweep_report import draw
from megatron_ext.simulation.trace import Turn, longest_request, root_sessions
from megatron_ext.simulation.trace_formats.sessions import SessionOptions

FOLDER = "MEGATRON_EXT_TRACES"
QUICK = Path(__file__).parent / "traces"
SEED = 36  # of the halves and of the subset


@case("simulation", quick={"memories": (16.0,), "policies": ("lru",), "sessions": 4})
def policies(
    run: Run,
    memories: tuple = (64.0, 256.0),
    share: float = 0.5,
    policies: tuple = ("lru", "flops"),
    placements: tuple = ("off", "even", "learned"),
    rate: float = 0.1,
    sessions: int = 0,
    common: bool = False,
    traces: tuple = ("all",),
    plots: str = "",
) -> None:
    """Share of prompt tokens skipped on the traces of the folder MEGATRON_EXT_TRACES, whole and in halves of sessions.

    `sessions` takes so many of each trace, by a seed; 0 takes all. `common` gives sessions common prefixes.
    """
    folder = QUICK if run.is_quick or FOLDER not in os.environ else Path(os.environ[FOLDER])
    model = MODELS["nemotron-h-8b"]
    parts: dict[str, list[Turn]] = {}
    for path in sorted(one for one in folder.iterdir() if {".json", ".jsonl"} & set(one.suffixes)):
        if traces != ("all",) and path.name not in traces:
            continue
        turns = read_trace(path, sessions=SessionOptions(rate, shares_prefixes=common))
        for name, part in _parts(turns, sessions).items():
            parts[f"{path.name.partition('.')[0]}, {name}"] = part
    settings = grid(memories, [share], [64], policies, ["kernel"], placements)
    with tqdm(total=len(parts) * len(settings), unit="run", disable=None) as progress:
        for name, part in parts.items():
            points: list[Point] = []
            for one in settings:
                points.append(_point(part, model, one))
                _report(run, name, points[-1])
                progress.update()
            if plots:
                draw(points, Path(plots) / name.replace(", ", "_"))


def _point(turns: Sequence[Turn], model: SimulatedModel, settings: Settings) -> Point:
    return run_point(turns, model.reaching(longest_request(turns)), settings, Batch(), Machine())


def _report(run: Run, name: str, point: Point) -> None:
    one = point.settings
    column = f"{one.policy}, {one.placement}"
    run.row(f"{name}, {one.memory_gib:g} GiB", {"prompt tokens": point.prompt_tokens, column: point.skipped_share})


def _parts(turns: Sequence[Turn], sessions: int) -> dict[str, list[Turn]]:
    """Return the turns of all sessions, and of two halves of the sessions; a sub-agent is in its parent's half."""
    roots = root_sessions(turns)
    names = sorted(set(roots))
    random.Random(SEED).shuffle(names)
    kept = names[:sessions] if sessions else names
    first, second = set(kept[: len(kept) // 2]), set(kept[len(kept) // 2 :])
    sides = {"all": first | second, "half A": first, "half B": second}
    return {
        name: [turn for turn, root in zip(turns, roots, strict=True) if root in side] for name, side in sides.items()
    }
