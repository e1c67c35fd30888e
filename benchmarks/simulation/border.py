"""Moving border between blocks and snapshots against fixed splits of the same memory, on 8 traces."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from benchmarks.cases import Run, case
from megatron_ext.simulation.cached_models import MODELS, CachedModel, KnownModel
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.generators import GENERATORS, Size
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.sweep import Batch, Settings, run_point
from megatron_ext.simulation.trace import Turn, longest_request, root_sessions
from megatron_ext.simulation.trace_formats.sessions import SessionOptions

FOLDER = "MEGATRON_EXT_TRACES"
EXCERPTS = Path(__file__).parent / "traces"
SEED = 36  # of subsets
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RATES = {"agents": 0.5, "chat": 1.0, "shared": 2.0, "rl": 2.0, "tenants": 1.0, "mixed": 1.5}  # generated
RECORDED = ("coding_agents", "mooncake")
GENERATED_GIB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RECORDED_GIB = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
SMALL_STATE = 2.3  # blocks of 64 tokens
MUST, GOAL = 0.95, 0.98  # of the best split


@dataclasses.dataclass(frozen=True)
class Cell:
    """One trace in one memory, under one policy."""

    model: str
    policy: str
    trace: str
    gib: float

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.model}, {self.policy}, {self.trace}, {self.gib:g} GiB"


@case("simulation", quick={"requests": 12, "sessions": 2, "processes": 1, "gib": (4.0,)})
def border(
    run: Run,
    models: tuple = ("nemotron-h-8b",),
    policies: tuple = ("lru",),
    traces: tuple = (*RATES, *RECORDED),
    requests: int = 400,
    sessions: int = 24,
    recorded_requests: int = 2000,
    gib: tuple = (0.0,),
    processes: int = 2,
    output: str = "",
) -> None:
    """Prompt tokens skipped with a moving border, as a share of what the best of nine splits skips.

    `models` may name `small-state`, whose state is as large as 2.3 blocks. `output` is a JSON file to which each cell
    is written; cells that it has are not simulated again. `gib` replaces the memories.
    """
    sizes = _Subsets(requests, sessions, recorded_requests, run.is_quick)
    cells = [
        Cell(model, policy, trace, memory)
        for model in models
        for policy in policies
        for trace in traces
        for memory in (gib if any(gib) else RECORDED_GIB if trace in RECORDED else GENERATED_GIB)
    ]
    path = Path(output) if output else None
    found: dict[str, dict[str, float]] = json.loads(path.read_text("utf-8")) if path and path.exists() else {}
    with (
        ProcessPoolExecutor(processes, get_context("spawn")) as pool,
        tqdm(total=len(cells), unit="cell", disable=None) as progress,
    ):
        left = {pool.submit(simulate, cell, sizes): cell for cell in cells if cell.name not in found}
        progress.update(len(cells) - len(left))
        for done in as_completed(left):
            found[left[done].name] = done.result()
            if path is not None:
                path.write_text(json.dumps(found, indent=1), "utf-8")
            progress.update()
    for cell in cells:
        run.row(cell.name, _figures(found[cell.name]))
    ratios = [_ratio(found[cell.name]) for cell in cells]
    run.row(
        "all",
        {
            "of the best split, mean": sum(ratios) / len(ratios),
            "of the best split, least": min(ratios),
            f"at least {MUST}": min(ratios) >= MUST or run.is_quick,
            f"{GOAL} in the mean": sum(ratios) / len(ratios) >= GOAL or run.is_quick,
        },
    )


@dataclasses.dataclass(frozen=True)
class _Subsets:
    """Sizes of the traces."""

    requests: int
    sessions: int
    recorded_requests: int
    are_excerpts: bool


def simulate(cell: Cell, sizes: _Subsets) -> dict[str, float]:
    """Return the tokens skipped by split, and with a moving border as `any`."""
    turns = _turns(cell.trace, sizes)
    model = _model(cell.model, longest_request(turns))
    found = {}
    for share in (*SHARES, None):
        settings = Settings(cell.gib, share, 64, cell.policy)
        point = run_point(turns, model, settings, Batch(), Machine())
        found["any" if share is None else f"{share:g}"] = point.skipped_tokens
    return found | {"prompt": point.prompt_tokens}


def _model(name: str, longest: int) -> CachedModel:
    model = MODELS["nemotron-h-8b"].reaching(longest)
    if name != "small-state":
        return model
    costs = model.costs(64)
    return KnownModel(dataclasses.replace(costs, state_bytes=int(SMALL_STATE * costs.block_bytes)), longest)


@lru_cache(maxsize=1)
def _turns(trace: str, sizes: _Subsets) -> list[Turn]:
    """Return a generated trace, or a subset of a recorded one, chosen by a seed."""
    if trace in GENERATORS:
        return list(GENERATORS[trace](Size(sizes.requests, RATES[trace])))
    folder = EXCERPTS if sizes.are_excerpts or FOLDER not in os.environ else Path(os.environ[FOLDER])
    (path,) = (one for one in sorted(folder.iterdir()) if one.name.startswith(trace))
    turns = read_trace(path, sessions=SessionOptions(0.1))
    chosen = random.Random(SEED)
    if trace == "mooncake":
        count = min(len(turns), sizes.recorded_requests)
        first = chosen.randrange(len(turns) - count + 1)
        return turns[first : first + count]
    roots = root_sessions(turns)
    names = sorted(set(roots))
    chosen.shuffle(names)
    kept = set(names[: sizes.sessions])
    return [turn for turn, root in zip(turns, roots, strict=True) if root in kept]


def _best(found: dict[str, float]) -> str:
    return max((f"{share:g}" for share in SHARES), key=lambda share: found[share])


def _ratio(found: dict[str, float]) -> float:
    return max(1, found["any"]) / max(1, found[_best(found)])


def _figures(found: dict[str, float]) -> dict[str, float | int | str | bool]:
    best = _best(found)
    return {
        "skipped, moving border": found["any"] / found["prompt"],
        "best split": best,
        "skipped, best split": found[best] / found["prompt"],
        "skipped, a fifth": found["0.2"] / found["prompt"],
        "of the best split": _ratio(found),
    }
