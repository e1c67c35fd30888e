"""Figures of the documents: `python -m tools.pages.figures` writes them into docs/images/, equal from run to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.pages.chart import chart
from tools.pages.drawing import COMPUTED, KEPT, LOST, PLAIN, STATE, Drawing
from tools.pages.packages import packages

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/images"
LEFT, BLOCK = 130.0, 132.0  # of rows along the tokens: where they begin, and pixels of a block of 64 tokens


def position(tokens: float) -> float:
    """Return the place of a token on the axis."""
    return LEFT + BLOCK * tokens / 64


def interval(drawing: Drawing, y: float, begin: float, end: float, text: str, fill: str) -> None:
    """Draw the tokens [begin, end) as a box of one row."""
    drawing.box(position(begin) + 1, y, position(end) - position(begin) - 2, 26, text, fill)


def hybrid_prompt() -> Drawing:
    """Return the figure of a hybrid model's prompt: blocks, states, skipped tokens and computed tokens."""
    drawing = Drawing(720, 236, "How a hybrid model's prompt of 230 tokens is cut: 128 are skipped, 102 computed")
    for tokens in (0, 64, 128, 192, 230):
        drawing.note(position(tokens), 20, str(tokens), "middle")
    drawing.text(12, 46, "prompt, in blocks")
    for index in range(3):
        interval(drawing, 28, 64 * index, 64 * index + 64, f"block {index}", PLAIN)
    interval(drawing, 28, 192, 230, "the rest", PLAIN)
    drawing.text(12, 86, "attention: K/V")
    interval(drawing, 68, 0, 128, "cached, shared with other requests", KEPT)
    interval(drawing, 68, 128, 230, "not cached", PLAIN)
    drawing.text(12, 128, "recurrent: states")
    drawing.dot(position(64), 124)
    drawing.dot(position(128), 124)
    drawing.note(position(128) + 14, 128, "snapshot at a block's end: resume here")
    drawing.text(12, 170, "prefill")
    interval(drawing, 152, 0, 128, "skipped", KEPT)
    interval(drawing, 152, 128, 230, "computed", COMPUTED)
    drawing.arrow(position(128), 134, position(128), 150)
    drawing.text(12, 212, "left for others")
    interval(drawing, 194, 128, 192, "block 2", KEPT)
    drawing.dot(position(192), 207)
    drawing.note(position(192) + 14, 211, "its last boundary")
    return drawing


def blocks() -> Drawing:
    """Return the figure of chained block hashes: two prompts that share two blocks."""
    drawing = Drawing(720, 190, "Two prompts whose first two blocks are equal have equal hashes for these blocks only")
    drawing.text(12, 50, "prompt A")
    drawing.text(12, 150, "prompt B")
    drawing.box(96, 80, 70, 40, "root", PLAIN)
    drawing.note(96, 138, "model, salt")
    for index, name in enumerate(("h0", "h1")):
        drawing.box(206 + 130 * index, 80, 90, 40, name, KEPT)
        drawing.arrow(166 + 130 * index, 100, 204 + 130 * index, 100)
    drawing.note(206, 72, "64 tokens and the hash before")
    for y, name, fill in ((30, "h2", KEPT), (130, "h2'", COMPUTED)):
        drawing.box(480, y, 90, 40, name, fill)
        drawing.arrow(426, 100, 478, y + 20)
    drawing.box(610, 130, 90, 40, "h3'", COMPUTED)
    drawing.arrow(570, 150, 608, 150)
    drawing.note(580, 54, "tokens differ, and so do")
    drawing.note(580, 70, "all hashes after them")
    return drawing


def states() -> Drawing:
    """Return the figure of states and snapshots along a sequence."""
    drawing = Drawing(720, 170, "One running state moves along the tokens; copies of it are kept at ends of blocks")
    for tokens in (0, 64, 128, 192, 256):
        drawing.note(position(tokens), 20, str(tokens), "middle")
    drawing.text(12, 46, "tokens")
    interval(drawing, 28, 0, 256, "one sequence: prefill, then decode", PLAIN)
    drawing.text(12, 98, "running state")
    for tokens in range(0, 256, 32):
        drawing.arrow(position(tokens) + 12, 94, position(tokens + 32) - 4, 94)
    drawing.text(12, 146, "snapshots")
    for tokens in (64, 192, 256):
        drawing.dot(position(tokens), 142)
        drawing.arrow(position(tokens), 100, position(tokens), 130)
    drawing.note(position(128), 146, "none: nothing asked for it", "middle")
    return drawing


def resume_point() -> Drawing:
    """Return the figure of a resume point before the end of the match."""
    drawing = Drawing(720, 200, "Three blocks match, a snapshot is left after the first: the request resumes at 64")
    for tokens in (0, 64, 128, 192, 230):
        drawing.note(position(tokens), 20, str(tokens), "middle")
    drawing.text(12, 46, "matched blocks")
    interval(drawing, 28, 0, 192, "three blocks are cached", KEPT)
    interval(drawing, 28, 192, 230, "own", PLAIN)
    drawing.text(12, 92, "snapshots")
    drawing.dot(position(64), 88)
    drawing.dot(position(128), 88, "-", PLAIN)
    drawing.dot(position(192), 88, "-", PLAIN)
    drawing.text(12, 138, "prefill")
    interval(drawing, 120, 0, 64, "skipped", KEPT)
    interval(drawing, 120, 64, 192, "no_snapshot: computed again", STATE)
    interval(drawing, 120, 192, 230, "partial", COMPUTED)
    drawing.arrow(position(64), 98, position(64), 118)
    drawing.note(position(64), 172, "computed again for the states; attention reads the shared K/V and writes none")
    return drawing


def scheduling() -> Drawing:
    """Return the figure of three steps with decodes and chunks of a prompt."""
    drawing = Drawing(720, 210, "Each step has one token of every decoding request and a chunk of a prompt")
    for step in range(3):
        x = 130 + 195 * step
        drawing.text(x + 85, 24, f"step {step + 1}", anchor="middle")
        drawing.box(x, 34, 170, 156, "", "#ffffff", dashed=True)
    rows = (("request a", "decode"), ("request b", "decode"), ("request c", "prefill"), ("request d", "waits"))
    for row, (name, kind) in enumerate(rows):
        y = 42 + 36 * row
        drawing.text(12, y + 18, name)
        for step in range(3):
            x = 138 + 195 * step
            if kind == "decode":
                drawing.box(x, y, 26, 26, "1", COMPUTED)
            elif kind == "prefill":
                text = ("192 of 500", "192 of 500", "116 of 500")[step]
                drawing.box(x, y, 154, 26, text, COMPUTED)
            elif step == 2:
                drawing.box(x, y, 100, 26, "hit: 40 left", COMPUTED)
            else:
                drawing.note(x, y + 18, "waits for c's prefix")
    return drawing


def eviction() -> Drawing:
    """Return the figure of the order in which entries go."""
    drawing = Drawing(720, 190, "Blocks and snapshots share one memory; the entry that is worth least goes first")
    drawing.text(12, 40, "one memory")
    entries = (
        ("block, in use", PLAIN),
        ("block, old leaf", LOST),
        ("block", KEPT),
        ("snapshot", STATE),
        ("opportunistic", LOST),
    )
    for index, (text, fill) in enumerate(entries):
        drawing.box(110 + 120 * index, 22, 114, 30, text, fill)
    drawing.text(12, 104, "goes")
    drawing.box(110, 84, 150, 32, "1: opportunistic", LOST)
    drawing.box(296, 84, 150, 32, "2: oldest leaf", LOST)
    drawing.box(482, 84, 150, 32, "3: next oldest", KEPT)
    drawing.arrow(260, 100, 294, 100)
    drawing.arrow(446, 100, 480, 100)
    drawing.note(110, 150, "A block that a request uses never goes; a snapshot goes with its block or earlier.")
    drawing.note(110, 170, "With --prefix-cache-dir evicted entries are written to disk first.")
    return drawing


def speculation() -> Drawing:
    """Return the figure of drafts that are verified in one step."""
    drawing = Drawing(720, 200, "Of four drafts in one step two are accepted, and the state after them stays")
    words = ("known", "draft 1", "draft 2", "draft 3", "draft 4")
    fills = (PLAIN, KEPT, KEPT, LOST, LOST)
    drawing.text(12, 46, "one step")
    for index, (word, fill) in enumerate(zip(words, fills, strict=True)):
        drawing.box(130 + 112 * index, 28, 106, 28, word, fill)
    drawing.text(12, 106, "model's token")
    for index, word in enumerate(("= draft 1", "= draft 2", "another", "", "")):
        if word:
            drawing.box(130 + 112 * index, 88, 106, 28, word, KEPT if index < 2 else COMPUTED)
            drawing.arrow(183 + 112 * index, 58, 183 + 112 * index, 86)
    drawing.text(12, 162, "states")
    for index in range(5):
        drawing.dot(183 + 112 * index, 158, "S" if index == 2 else "x", STATE if index == 2 else PLAIN)
    drawing.note(130, 190, "Three tokens of one step; the state after the last accepted draft is kept.")
    return drawing


def ranks() -> Drawing:
    """Return the figure of a driver and workers."""
    drawing = Drawing(720, 200, "Rank 0 schedules; every rank plans the same steps and computes its part")
    drawing.box(270, 16, 180, 44, "rank 0: driver", KEPT)
    drawing.note(460, 42, "requests in, records out")
    for index in range(4):
        x = 40 + 165 * index
        drawing.box(x, 110, 145, 60, f"rank {index}", PLAIN)
        drawing.note(x + 72, 160, "blocks, states: its part", "middle")
        drawing.arrow(360, 60, x + 72, 108)
    drawing.note(20, 92, "commands before each step")
    for index in range(3):
        drawing.arrow(185 + 165 * index, 140, 203 + 165 * index, 140)
    drawing.note(360, 190, "partial products of tensor parallelism, activations between stages", "middle")
    return drawing


def replicas() -> Drawing:
    """Return the figure of a router in front of replicas."""
    drawing = Drawing(720, 200, "A router sends each request to the replica that computes the fewest tokens first")
    drawing.box(20, 80, 100, 40, "client", PLAIN)
    drawing.box(190, 70, 150, 60, "router", KEPT)
    drawing.arrow(120, 100, 188, 100)
    for index, (cached, own) in enumerate((("1,920 cached", "128 to compute"), ("0 cached", "2,048 to compute"))):
        y = 30 + 100 * index
        drawing.box(500, y, 200, 50, "", PLAIN)
        drawing.text(512, y + 21, f"replica {index + 1}: {cached}")
        drawing.note(512, y + 39, own)
        drawing.arrow(340, 100, 498, y + 25, dashed=index == 1)
    drawing.note(400, 62, "the request", "middle")
    drawing.note(30, 180, "Replicas tell the router their cached blocks, as KV events, and their load.")
    return drawing


def disk() -> Drawing:
    """Return the figure of entries between memory and disk."""
    drawing = Drawing(720, 180, "Entries that leave memory are written to disk, and come back where that is quicker")
    drawing.box(30, 60, 170, 60, "memory", KEPT)
    drawing.box(300, 60, 170, 60, "disk: its budget", STATE)
    drawing.box(560, 60, 140, 60, "next process", PLAIN)
    drawing.arrow(200, 78, 298, 78)
    drawing.note(250, 70, "evicted", "middle")
    drawing.arrow(300, 104, 202, 104)
    drawing.note(250, 122, "a hit: read", "middle")
    drawing.arrow(470, 90, 558, 90)
    drawing.note(514, 82, "put back", "middle")
    drawing.note(30, 160, "Each read is verified. What cannot be read in time or is damaged is computed instead.")
    return drawing


FIGURES: dict[str, Callable[[], Drawing]] = {
    "hybrid_prompt.svg": hybrid_prompt,
    "concepts/blocks.svg": blocks,
    "concepts/states.svg": states,
    "concepts/resume_point.svg": resume_point,
    "concepts/scheduling.svg": scheduling,
    "concepts/eviction.svg": eviction,
    "concepts/speculation.svg": speculation,
    "concepts/ranks.svg": ranks,
    "concepts/replicas.svg": replicas,
    "concepts/disk.svg": disk,
    "speed.svg": chart,
    "packages.svg": packages,
}


def main() -> None:
    """Write every figure."""
    for name, draw in FIGURES.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
