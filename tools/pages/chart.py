"""Speed in the README, from the table that `benchmarks.summary` writes into RESULTS.md: a chart and a short table.

`python -m tools.pages.chart` writes the table into the README, between its marks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tools.pages.drawing import COMPUTED, KEPT, LINE, PLAIN, Drawing

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/RESULTS.md"
PEERS = {"vLLM": "over vLLM's", "transformers": "over transformers'", "llama.cpp": "over llama.cpp's, f32"}
SIZES = ("5 M", "0.25 B")
# Title of a panel, beginning of its row, and which of the row's figures it shows.
PANELS = (
    ("cold ttft, 2,176 tokens", "cold time to first token", 0),
    ("warm ttft, 2,048 cached", "warm, 128 own tokens", 0),
    ("decode step of 1", "decode step of", 0),
    ("decode step of 8", "decode step of", 2),
)
# Words of a row of the README's table, the beginning of the measured row, which of its figures, and the unit.
TABLE = (
    ("first token of a new prompt, 2,176 tokens", "cold time to first token", 0, "ms"),
    ("the same, when 2,048 of the tokens are cached", "warm, 128 own tokens", 0, "ms"),
    ("each token of one request", "decode step of", 0, "ms"),
    ("each token of eight requests that run together", "decode step of", 2, "ms"),
    ("tokens of eight requests with 2,048 in common", "eight at once, 2,048 shared: generated", 0, "a second"),
    ("tokens of eight requests with nothing in common", "eight at once, 544 tokens", 0, "a second"),
)
MARKS = "<!-- speed -->\n", "<!-- speed: end -->"
FILLS = {"megatron_ext": KEPT, "vLLM": COMPUTED, "transformers": PLAIN}
_WIDTH, _BAR, _LEFT, _TOP = 168.0, 20.0, 96.0, 58.0


@dataclass(frozen=True)
class Row:
    """Row of the table: our figures, and their ratios to each peer's."""

    name: str
    ours: list[float]
    ratios: dict[str, list[float]]


def numbers(cell: str) -> list[float]:
    """Return the figures of a cell."""
    return [float(one.replace(",", "")) for one in re.findall(r"[\d.,]+", cell)]


def read(text: str) -> tuple[str, list[Row]]:
    """Return the machine and the rows of the table of standard rows."""
    block = re.search(r"<!-- benchmarks: standard -->\n(.*?)<!-- benchmarks: end -->", text, re.DOTALL)
    if block is None:
        raise ValueError("no table of standard rows")
    head, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block[1].splitlines() if line.startswith("|")
    ]
    columns = {
        peer: next(at for at, title in enumerate(head) if title.partition(" (")[0] == name)  # what a peer preloads
        for peer, name in PEERS.items()
    }
    rows = [Row(line[0], numbers(line[1]), {one: numbers(line[at]) for one, at in columns.items()}) for line in lines]
    return head[0].split("; [")[0].replace(", one run", ", fp32, one run"), rows


def row_of(rows: list[Row], beginning: str) -> Row:
    """Return the row whose name begins with a text."""
    return next(one for one in rows if one.name.startswith(beginning))


def figures(row: Row, at: int) -> dict[str, float]:
    """Return a figure of each measured system; a peer's is ours over the ratio of the same run."""
    peers = {peer: row.ours[at] / ratios[at] for peer, ratios in row.ratios.items() if len(ratios) > at}
    return {"megatron_ext": row.ours[at]} | peers


def table() -> str:
    """Return the README's table: figures of the larger model, in one unit a row."""
    machine, rows = read(RESULTS.read_text("utf-8"))
    size, names = SIZES[-1], ("megatron_ext", *PEERS)
    lines = [f"| {size.replace(' B', ' billion parameters')}, {machine.split(', one run')[0]} | {' | '.join(names)} |"]
    lines.append("|---" * (1 + len(names)) + "|")
    for words, beginning, at, unit in TABLE:
        found = figures(row_of(rows, f"{size}, fp32: {beginning}"), at)
        cells = (f"{shown(found[name])} {unit}" if name in found else "" for name in names)
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def chart() -> Drawing:
    """Return the chart: a row of panels for each size."""
    machine, rows = read(RESULTS.read_text("utf-8"))
    drawing = Drawing(800, 320, "Time to first token and decode steps beside vLLM and transformers; shorter is better")
    drawing.text(16, 24, "milliseconds, shorter is better", size=14)
    for index, name in enumerate(FILLS):
        drawing.box(430 + 120 * index, 12, 14, 14, "", FILLS[name])
        drawing.text(450 + 120 * index, 24, name)
    for line, size in enumerate(SIZES):
        top = _TOP + 116 * line
        drawing.text(16, top + 50, size, size=14)
        for column, (title, beginning, at) in enumerate(PANELS):
            panel(drawing, _LEFT + (_WIDTH + 8) * column, top, title, row_of(rows, f"{size}, fp32: {beginning}"), at)
    drawing.note(16, 306, machine.replace("`", ""))
    return drawing


def panel(drawing: Drawing, x: float, top: float, title: str, row: Row, at: int) -> None:
    """Draw the bars of one figure, to the scale of the longest."""
    values = {name: value for name, value in figures(row, at).items() if name in FILLS}
    drawing.note(x, top + 6, title)
    longest = max(values.values())
    for index, (name, value) in enumerate(values.items()):
        y, width = top + 14 + (_BAR + 4) * index, 108 * value / longest
        drawing.box(x, y, max(1.0, width), _BAR, "", FILLS[name])
        drawing.text(x + width + 6, y + 15, shown(value))
    drawing.box(x - 1, top + 12, 0.5, 3 * (_BAR + 4), "", LINE)


def shown(value: float) -> str:
    """Return a figure with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Write the table into the README."""
    path = ROOT / "README.md"
    before, begin, rest = path.read_text("utf-8").partition(MARKS[0])
    path.write_text(f"{before}{begin}{table()}{MARKS[1]}{rest.partition(MARKS[1])[2]}", "utf-8")


if __name__ == "__main__":
    main()
