"""Chart of time to first token and decode steps, from the table that `benchmarks.summary` writes into RESULTS.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tools.pages.drawing import COMPUTED, KEPT, LINE, PLAIN, Drawing

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/RESULTS.md"
PEERS = {"vLLM": "over vLLM's", "transformers": "over transformers'"}
SIZES = ("5 M", "0.25 B")
# Title of a panel, beginning of its row, and which of the row's figures it shows.
PANELS = (
    ("cold ttft, 2,176 tokens", "cold time to first token", 0),
    ("warm ttft, 2,048 cached", "warm, 128 own tokens", 0),
    ("decode step of 1", "decode step of", 0),
    ("decode step of 8", "decode step of", 2),
)
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
    columns = {peer: head.index(name) for peer, name in PEERS.items()}
    rows = [Row(line[0], numbers(line[1]), {one: numbers(line[at]) for one, at in columns.items()}) for line in lines]
    return head[0].split("; [")[0], rows


def chart() -> Drawing:
    """Return the chart: a row of panels for each size; a peer's figure is ours over the ratio of the same run."""
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
            row = next(one for one in rows if one.name.startswith(f"{size}: {beginning}"))
            panel(drawing, _LEFT + (_WIDTH + 8) * column, top, title, row, at)
    drawing.note(16, 306, machine.replace("`", ""))
    return drawing


def panel(drawing: Drawing, x: float, top: float, title: str, row: Row, at: int) -> None:
    """Draw the bars of one figure, to the scale of the longest."""
    values = {"megatron_ext": row.ours[at]} | {
        peer: row.ours[at] / ratios[at] for peer, ratios in row.ratios.items() if len(ratios) > at
    }
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
