"""Table of the figures of launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tools.kernel_checks.figures import FEW_PROGRAMS, Row


def worst(rows: Iterable[Row]) -> list[Row]:
    """Return for each kernel and model the steps with the fewest useful programs and with the most trips."""
    by_kernel: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_kernel.setdefault((row.kernel, row.model), []).append(row)
    found = []
    for several in by_kernel.values():
        emptiest = min(several, key=lambda row: (row.useful if row.programs > FEW_PROGRAMS else 1.0, -row.programs))
        deepest = max(several, key=lambda row: row.trips)
        found += [emptiest, *([deepest] if deepest.trips > emptiest.trips else [])]
    return found


def as_text(rows: Sequence[Row]) -> str:
    """Format rows as a table in Markdown."""
    lines = ["| kernel | model | step | programs | useful | trips | MB | breaks |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row.programs:,} | {row.useful:.0%} | {row.trips:,} | {row.operator_bytes / 1e6:,.0f}"
        lines.append(f"| `{row.kernel}` | {row.model} | {row.step} | {figures} | {', '.join(row.problems)} |")
    return "\n".join(lines)
