"""Summary of a run's standard rows in RESULTS.md: `python -m benchmarks.summary FIGURES.json`.

Prints the tables of the standard rows and of the goals. `--update FILE` writes each table between its marks in a
document, which are lines of their own: `<!-- benchmarks: standard -->` or `<!-- benchmarks: goals -->`, and
`<!-- benchmarks: end -->`. Standard library only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.cases import Figure, Page
from benchmarks.goals import GOALS
from benchmarks.peers.sizes import SIZES, Size
from benchmarks.peers.work import (
    AT_ONCE,
    FIRST,
    LATER,
    OURS,
    OURS_INT8,
    PRELOADED,
    PROBE,
    RATE,
    READ,
    READ_ONCE,
    STEP,
    TTFT,
    UNIQUE,
    WEIGHTS,
    decode_row,
    shared_row,
)
from benchmarks.tables import cell

Pages = Mapping[str, Page]
Q8_0 = "llama_q8_0"
PEERS = {
    "vllm": "vLLM's",
    "transformers": "transformers'",
    "llama_f32": "llama.cpp's, f32",
    Q8_0: "llama.cpp's, Q8_0",
}
MACHINE = "machine"  # key of the machine's description in a file of figures


def add_floors(pages: Pages) -> None:
    """Add the floor of decode steps to the pages of ours: all weights, read at the fastest rate of the run.

    The rate is the greatest at which a loop read as many bytes, or an engine in fp32 took a step; so no step is faster.
    """
    for key, size in SIZES.items():
        ours = _page(pages, OURS, key)
        names = [WEIGHTS, *map(decode_row, size.work.batches)]
        found = [_page(pages, peer, key) for peer in (OURS, *PEERS) if peer != Q8_0]
        rates = [rate for page in found for name in names if (rate := _value(page, name, READ))]
        for name in map(decode_row, size.work.batches):
            rate, step = _value(ours, name, READ), _value(ours, name, STEP)
            if ours and rate and step:
                over = max(rates) / rate
                ours["rows"][name] |= {"weights read once, ms": step / over, READ_ONCE: over}


def standard_table(pages: Pages, machine: str) -> str:
    """Return the table of the standard rows: ours, over the floor, and over each measured peer's.

    Args:
        pages: Pages by case.
        machine: Processor, threads and the like.
    """
    measured = {peer for peer in (OURS_INT8, *PEERS) for size in SIZES if _page(pages, peer, size)}
    others = [peer for peer in PEERS if peer in measured]
    head = [
        f"{machine}, one run of `make bench`",
        *("ours", "over the floor"),
        *(["over ours in fp32"] if OURS_INT8 in measured else []),
        *(f"over {PEERS[one]}{_preloads(pages, one)}" for one in others),
    ]
    lines = [head, ["---"] * len(head)]
    for (key, size), (own, types) in itertools.product(SIZES.items(), ((OURS, "fp32"), (OURS_INT8, "int8"))):
        ours = _page(pages, own, key)
        for name, column, floor, rows in _work(size) if ours else ():
            values = [_value(ours, row, column) for row in rows]
            if any(value is None for value in values):
                continue
            beside = {Q8_0} & measured | {OURS} if own == OURS_INT8 else measured - {OURS_INT8, Q8_0}
            ratios = [
                _ratios(values, _page(pages, peer, key), rows, column) if peer in beside else ""
                for peer in ([OURS] if OURS_INT8 in measured else []) + others
            ]
            floors = _listed([_value(ours, row, floor) for row in rows]) if floor else ""
            lines.append([f"{size.title}, {types}: {name}", _listed(values), floors, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _preloads(pages: Pages, peer: str) -> str:
    """Return the libraries that a peer's process was started with, in brackets."""
    found = {page["rows"].get(PRELOADED, {}).get(PRELOADED) for size in SIZES if (page := _page(pages, peer, size))}
    return "".join(f" ({names} preloaded)" for names in sorted(map(str, found - {None})))


def _work(size: Size) -> list[tuple[str, str, str, list[str]]]:
    """Return name, column, column of the floor, and rows, of each line of the table."""
    work = size.work
    prefixes = " / ".join(f"{prefix:,}" for prefix in work.prefixes)
    alone, together = ([shared_row(prefix, count) for prefix in work.prefixes] for count in (1, AT_ONCE))
    batches = " / ".join(map(str, work.batches))
    lines = [
        (f"cold time to first token, {prefixes} and 128 own tokens, ms", FIRST, "first / floor", alone),
        (f"warm, 128 own tokens after {prefixes} cached ones, ms", LATER, "later / floor", alone),
        (
            f"decode step of {batches} requests, ms (floor: the weights are read once)",
            STEP,
            READ_ONCE,
            [decode_row(one) for one in work.batches],
        ),
        (f"eight at once, {prefixes} shared: generated tokens/s", RATE, "", together),
        (f"eight at once, {prefixes} shared: later time to first token, ms", LATER, "", together),
        (f"eight at once, {work.unique:,} tokens with nothing shared: generated tokens/s", RATE, "", [UNIQUE]),
    ]
    if work.chats:
        rows = [f"chat, turn {turn}" for turn in range(1, 5)]
        lines.append((f"{work.chats} chats of 4 turns: median time to first token by turn, ms", TTFT, "", rows))
    return lines


def _page(pages: Pages, peer: str, size: str) -> Page | None:
    page = pages.get(f"standard.{peer}_{size}")
    return page if page and page["rows"] else None


def _value(page: Page | None, row: str, column: str) -> float | None:
    value = page["rows"].get(row, {}).get(column) if page else None
    return None if value is None else float(value)


def _ratios(ours: Sequence[float | None], page: Page | None, rows: Sequence[str], column: str) -> str:
    theirs = [_value(page, row, column) for row in rows]
    return _listed([one / other if one and other else None for one, other in zip(ours, theirs, strict=True)])


def _listed(values: Sequence[Figure]) -> str:
    """Return numbers in one cell; nothing if none was measured."""
    if all(value is None for value in values):
        return ""
    return " / ".join("-" if value is None else cell(value) for value in values)


def other_tokens(pages: Pages) -> list[str]:
    """Return a line for each peer that generates other tokens than ours, after one prompt."""
    lines = []
    for size in SIZES:
        ours = _page(pages, OURS, size)
        for peer in PEERS:
            theirs = _page(pages, peer, size)
            if ours and theirs and theirs["rows"].get(PROBE) != ours["rows"].get(PROBE):
                lines.append(f"standard.{peer}_{size} generates other tokens than standard.{OURS}_{size}")
    return lines


def goals_table(pages: Pages) -> str:
    """Return the table of the goals whose cases were run."""
    lines = [["goal", "measured", "wanted", ""], ["---"] * 4]
    for goal in GOALS:
        if goal.case in pages:
            found = goal.judge(pages)
            lines.append([goal.name, *(cell(found[column]) for column in ("measured", "wanted", "result"))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(pages: Pages, machine: str) -> dict[str, str]:
    """Return all tables by the names of their places; see `standard_table`."""
    return {"standard": standard_table(pages, machine), "goals": goals_table(pages)}


_BLOCK = re.compile(r"(<!-- benchmarks: (standard|goals) -->\n).*?(<!-- benchmarks: end -->)", re.DOTALL)


def updated(path: Path, pages: Pages, machine: str) -> str:
    """Return the text of a document with its tables replaced.

    Raises:
        ValueError: It has no place for a table.
    """
    text = path.read_text("utf-8")
    if not _BLOCK.search(text):
        raise ValueError(
            f"{path} has no line <!-- benchmarks: standard --> or <!-- benchmarks: goals --> before an end"
        )
    found = tables(pages, machine)
    return _BLOCK.sub(lambda block: f"{block[1]}\n{found[block[2]]}\n\n{block[3]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or update documents. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, help="file that --json of the benchmarks has written")
    parser.add_argument("--update", type=Path, nargs="+", default=(), metavar="FILE", help="documents with marks")
    options = parser.parse_args(argv)
    pages = json.loads(options.figures.read_text("utf-8"))
    machine = pages.pop(MACHINE)
    try:
        texts = {path: updated(path, pages, machine) for path in options.update}
    except (OSError, ValueError) as error:
        print(f"benchmarks.summary: error: {error}", file=sys.stderr)
        return 2
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    if not texts:
        print("\n\n".join(tables(pages, machine).values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
