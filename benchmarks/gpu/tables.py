"""Tables of the figures found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.gpu import peer
from benchmarks.gpu.notes import Page
from benchmarks.gpu.part import OPERATORS

COLUMNS = ("us", "us a call", "plain torch us", "TB/s", "TFLOP/s")
BESIDE = "mamba2"  # whose model is the peer's, too
REMARKS = ("device", "settings")


def show(console: Console, pages: Mapping[str, Page]) -> None:
    """Print all figures and what is missing."""
    models = {name: page for name, page in pages.items() if name != OPERATORS}
    for name, text in remarks(pages):
        console.print(f"{name}: {text}", markup=False)
    if models:
        console.print(models_table(models))
    if OPERATORS in pages:
        console.print(operators_table(pages[OPERATORS]))
    for name in (peer.NAME, peer.WIDE):
        if name in pages and BESIDE in pages:
            console.print(beside_table(pages[BESIDE], pages[name], name))
    console.print("seconds: " + ", ".join(f"{name} {page['seconds']:.0f}" for name, page in pages.items()))
    for name, page in pages.items():
        for row in page["failed"]:
            console.print(f"{name}: {row} failed: {page['found'].get(row, '')}", markup=False)
        if page["left_out"]:
            console.print(f"{name}: no time for {', '.join(page['left_out'])}", markup=False)


def remarks(pages: Mapping[str, Page]) -> Iterable[tuple[str, str]]:
    """Remarks about what was measured with; remarks about ours appear once."""
    seen: set[str] = set()
    for name, page in pages.items():
        for remark in REMARKS:
            text = str(page["found"].get(remark, ""))
            if text and text not in seen:
                seen.add(text)
                yield name, text


def models_table(pages: Mapping[str, Page]) -> Table:
    """Rows are what was found, columns are models."""
    table = Table("", *pages)
    rows = dict.fromkeys(row for page in pages.values() for row in page["found"] if row not in REMARKS)
    for row in rows:
        table.add_row(row, *(_text(page["found"].get(row)) for page in pages.values()))
    return table


def operators_table(page: Page) -> Table:
    """Rows are operators."""
    table = Table("operator", *COLUMNS)
    names = dict.fromkeys(row.rpartition(": ")[0] for row in page["found"] if ": " in row and row not in REMARKS)
    for name in names:
        table.add_row(name, *(_text(page["found"].get(f"{name}: {column}")) for column in COLUMNS))
    return table


def beside_table(ours: Page, theirs: Page, name: str) -> Table:
    """Table of the speedup over the peer: rows that both have. Its best way to decode is compared with our graphs."""
    table = Table("ours beside its", "ours", name, "times as fast")
    for row, mine in ours["found"].items():
        is_rate = row.endswith("tokens/s")
        its = best_of(theirs, row) if is_rate else theirs["found"].get(row)
        if not (is_rate or (row.endswith(" ms") and "at once" in row)):
            continue
        if isinstance(mine, float) and isinstance(its, float):
            table.add_row(row, _text(mine), _text(its), f"{(mine / its if is_rate else its / mine):.2f}")
    return table


def best_of(page: Page, row: str) -> float | None:
    """Highest rate of decoding so many requests, over all its ways of scheduling; None if there is no such row."""
    begin = row.partition(",")[0]
    rates = [
        value
        for name, value in page["found"].items()
        if name.startswith(f"{begin},") and name.endswith("tokens/s") and isinstance(value, float)
    ]
    return max(rates, default=None)


def _text(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"
