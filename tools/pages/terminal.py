"""Picture of a terminal after `make demo`: `python -m tools.pages.terminal` runs it and writes docs/images/demo.svg.

The picture has the times of its run, so it changes with each; it is made again when the output changes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools.pages.drawing import Drawing

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/images/demo.svg"
COLUMNS, FIRST, LAST = 80, 4, 2  # requests that are shown at both ends
_LINE, _WIDE = 16.0, 7.25
BACK, TEXT, DIM, BRIGHT = "#1b1f24", "#d7dde3", "#8b949e", "#7ee0c9"


def run() -> str:
    """Return what the demonstration prints, errors and results in order."""
    command = [sys.executable, "-u", "tools/run_inference.py"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout


def shortened(output: str) -> list[str]:
    """Return the lines that are shown: the first and last few requests of the table, and no table of the engine."""
    lines = [line for line in output.splitlines() if not line.startswith(tuple("┏┃┡│└"))]
    heads = [number for number, line in enumerate(lines) if re.match(r" {3,5}\d+ +\d+ ", line)]
    end = next(number for number in range(heads[-1], len(lines)) if not lines[number])
    left_out = f"        ... {len(heads) - FIRST - LAST} more"
    return [*lines[: heads[FIRST]], left_out, *lines[heads[-LAST] : end], *lines[end:]]


def picture(lines: list[str]) -> Drawing:
    """Return the picture of a terminal with these lines after the command."""
    shown = ["$ make demo", *lines]
    height = _LINE * len(shown) + 44
    drawing = Drawing(_WIDE * COLUMNS + 40, height, "Terminal after make demo: what each prompt skipped", BACK)
    for index, fill in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        drawing.dot(24 + 26 * index, 18, "", fill)
    for index, line in enumerate(shown):
        is_dim = line.startswith(("start:", "        <", "        ...")) or re.match(r" {6}\S", line) is not None
        is_bright = index == 0 or line.startswith("    id")
        drawing.mono(20, 48 + _LINE * index, line[:COLUMNS], BRIGHT if is_bright else DIM if is_dim else TEXT)
    return drawing


def main() -> None:
    """Run the demonstration and write its picture."""
    PICTURE.write_text(picture(shortened(run())).svg(), "utf-8")


if __name__ == "__main__":
    main()
