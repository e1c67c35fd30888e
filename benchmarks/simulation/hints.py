"""Hints of requests on whole recorded traces: skipped tokens without, with, and with an oracle's knowledge."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from benchmarks.cases import Run, case
from benchmarks.simulation.policies import FOLDER, QUICK, parts_of
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.hints import Hints
from megatron_ext.simulation.cached_models import MODELS
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.oracle import Oracle, Recorder, Uses
from megatron_ext.simulation.sweep import Batch, Point, Settings, run_point
from megatron_ext.simulation.trace import Turn, longest_request, with_hints
from megatron_ext.simulation.trace_formats.sessions import SessionOptions

UNLIMITED = 8192.0  # GiB, for the record of what comes back


@case("simulation", quick={"memories": (4.0,), "shares": (0.1,), "sessions": 4})
def hints(
    run: Run,
    memories: tuple = (16.0, 32.0, 64.0),
    shares: tuple = (0.0,),
    policy: str = "lru",
    columns: tuple = ("none", "honest", "honest, ends", "oracle"),
    rate: float = 0.1,
    sessions: int = 0,
    common: bool = False,
    trace: str = "coding_agents.jsonl.xz",
    parts: tuple = ("all",),
) -> None:
    """Share of prompt tokens skipped on a trace of the folder MEGATRON_EXT_TRACES at equal bytes, by the hints given.

    `honest` are session, parent and turn; `ends` are the last requests of sessions as well; the oracle knows what comes
    back. Each has the best of `shares` of the memory for snapshots; 0 is the default, one memory for blocks and
    snapshots. Other settings are as in `simulation.policies`.
    """
    whole = not run.is_quick and FOLDER in os.environ
    path = Path(os.environ[FOLDER]) / trace if whole else QUICK / "coding_agents_20.jsonl.xz"
    found = parts_of(read_trace(path, sessions=SessionOptions(rate, shares_prefixes=common)), sessions)
    count = len(parts) * (len(memories) * len(shares) * len(columns) + ("oracle" in columns))
    with tqdm(total=count, unit="run", disable=None) as progress:
        for part in parts:
            _compare(run, part, found[part], [memories, shares], policy, columns, progress.update)


def _compare(
    run: Run,
    name: str,
    turns: Sequence[Turn],
    sizes: Sequence[Sequence[float]],
    policy: str,
    columns: Sequence[str],
    progress: Callable[[], object],
) -> None:
    model = MODELS["nemotron-h-8b"].reaching(longest_request(turns))
    given = {"none": turns, "honest": with_hints(turns), "honest, ends": with_hints(turns, with_ends=True)}
    uses = Uses()

    def point(column: str, memory: float, share: float, follow: Callable[[BlockIndex], Hints] | None) -> Point:
        settings = Settings(memory, share or None, 64, policy, "kernel", "even")
        found = run_point(given.get(column, given["honest"]), model, settings, Batch(), Machine(), follow)
        progress()
        return found

    if "oracle" in columns:
        all_of_it = point("none", UNLIMITED, 0.5, partial(Recorder, uses=uses))
        run.row(f"{name}, unlimited", {"prompt tokens": all_of_it.prompt_tokens, "skipped": all_of_it.skipped_share})
    memories, shares = sizes
    for memory in memories:
        best: dict[str, float] = {}
        for column in columns:
            follow = partial(Oracle, uses=uses) if column == "oracle" else None
            points = [point(column, memory, share, follow) for share in shares]
            chosen = max(points, key=lambda one: one.skipped_tokens)
            best[column] = chosen.skipped_share
            figures = {column: chosen.skipped_share, f"{column}: for snapshots": chosen.settings.state_share}
            if column != columns[0]:
                figures[f"{column} / {columns[0]}"] = chosen.skipped_share / max(1e-9, best[columns[0]])
            run.row(f"{name}, {memory:g} GiB", figures)
