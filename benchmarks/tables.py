"""Markdown tables of figures. Standard library only."""

from __future__ import annotations

from benchmarks.cases import Figure, Rows


def table(rows: Rows) -> str:
    """Return figures as Markdown tables: a line for each row; rows with the same first column share a table."""
    groups: dict[str | None, Rows] = {}
    for name, figures in rows.items():
        groups.setdefault(next(iter(figures), None), {})[name] = figures
    return "\n\n".join(map(_group, groups.values()))


def _group(rows: Rows) -> str:
    columns = list(dict.fromkeys(column for figures in rows.values() for column in figures))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(cell(figures.get(column)) for column in columns)] for name, figures in rows.items()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def cell(value: Figure) -> str:
    """Return a figure as text: three digits, or an integer from a thousand on."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value
