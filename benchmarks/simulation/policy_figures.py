"""Table and plot of the results of `simulation.policies`, for docs/policies.md.

Run: `python -m benchmarks.simulation.policy_figures FILE.jsonl docs/images/policies_recorded.svg`; the table goes to
the standard output. `policies_recorded.jsonl` has the results that the document shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulation.policies import Cell

POLICIES, PLACEMENTS = ("lru", "flops"), ("off", "even", "learned")
TITLES = {"coding_agents": "coding agents", "mooncake_conversation": "Mooncake"}
COLOURS, LINES = {"lru": "tab:blue", "flops": "tab:orange"}, {"off": ":", "even": "--", "learned": "-"}
Key = tuple[str, bool, str, float]
Shares = dict[Key, dict[tuple[str, str], float]]


def read_cells(path: Path) -> list[Cell]:
    """Return the results of a file of JSON lines."""
    return [Cell(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def by_row(cells: Sequence[Cell]) -> Shares:
    """Return the skipped shares by trace, common prefixes, part and memory, then by policy and placement."""
    rows: Shares = {}
    for cell in cells:
        key = cell.trace, cell.common, cell.part, cell.memory_gib
        rows.setdefault(key, {})[cell.policy, cell.placement] = cell.skipped_tokens / cell.prompt_tokens
    return rows


def table(cells: Sequence[Cell]) -> str:
    """Return a table in Markdown, a row for each trace, part and memory."""
    columns = [(policy, placement) for policy in POLICIES for placement in PLACEMENTS]
    lines = [
        "| trace | sessions | GiB | " + " | ".join(f"`{policy}`, {placement}" for policy, placement in columns) + " |",
        "|" + "---|" * (3 + len(columns)),
    ]
    for (trace, common, part, memory), shares in by_row(cells).items():
        name = TITLES.get(trace, trace) + (", common prefixes" if common else "")
        values = [f"{shares[one]:.4f}".lstrip("0") if one in shares else "" for one in columns]
        lines.append(f"| {name} | {part} | {memory:g} | {' | '.join(values)} |")
    return "\n".join(lines)


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Plot the skipped share over memory, a panel for each trace; thin lines are halves of the sessions."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "policies"  # equal figures give equal files
    mpl.rcParams["svg.fonttype"] = "none"
    rows = {key: shares for key, shares in by_row(cells).items() if not key[1]}
    traces = list(dict.fromkeys(key[0] for key in rows))
    drawn = Figure(figsize=(4.5 * len(traces), 4), layout="constrained")
    panels = dict(zip(traces, drawn.subplots(1, len(traces), squeeze=False)[0], strict=True))
    for (trace, part, column), points in _lines(rows).items():
        style = {"color": COLOURS[column[0]], "linestyle": LINES[column[1]]}
        if part == "all":
            style |= {"marker": "o", "markersize": 3, "label": ", ".join(column)}
        panels[trace].plot(*zip(*sorted(points), strict=True), linewidth=1.6 if part == "all" else 0.5, **style)
    for trace, panel in panels.items():
        memories = sorted({key[3] for key in rows if key[0] == trace})
        panel.set_xscale("log")
        panel.set_xticks(memories, [f"{one:g}" for one in memories], minor=False)
        panel.set_xticks([], minor=True)
        panel.set(title=TITLES.get(trace, trace), xlabel="GiB of blocks and snapshots", ylabel="prompt tokens skipped")
        panel.legend(fontsize="small")
    drawn.savefig(path, metadata={"Date": None})


def _lines(rows: Shares) -> dict[tuple[str, str, tuple[str, str]], list[tuple[float, float]]]:
    """Return memory and share of the points of each line: by trace, part, and policy with placement."""
    lines: dict[tuple[str, str, tuple[str, str]], list[tuple[float, float]]] = {}
    for (trace, _, part, memory), shares in rows.items():
        for column, share in shares.items():
            lines.setdefault((trace, part, column), []).append((memory, share))
    return lines


if __name__ == "__main__":
    found = read_cells(Path(sys.argv[1]))
    print(table(found))
    draw(found, Path(sys.argv[2]))
