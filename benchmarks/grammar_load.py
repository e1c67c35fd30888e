"""Effect of a request with a costly grammar on the stream of another client (SE-10).

Run: `python -m benchmarks.grammar_load --seconds 20`. A server of the embedded model in a process of its own serves one
client's streams: alone, beside requests for 64 choices, and beside the same requests with a `response_format` whose
masks take some 15 ms of a core each. Exit code 1 if the largest gap beside the grammar is more than twice the one
beside the same choices without it, or if an answer was a 5xx.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from benchmarks.server_load import serve
from benchmarks.serving.figures import percentile

CHOICES, GENERATED, WATCHED = 64, 64, 384  # choices of a request; tokens of each, and of a watched stream
LETTERS = 60_000  # of the one string that the grammar allows
MOST = 2.0  # times the largest gap without the grammar
WORDS = [17, 230, 41, 512, 77, 90, 1033, 8]


@dataclass
class Phase:
    """Observations while a load ran.

    Attributes:
        name: Name of the load.
        gaps: Seconds between two events of the watched stream.
        answers: HTTP status of each request of the load.
        tokens: Tokens that the load received.
    """

    name: str
    gaps: list[float] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    tokens: int = 0


def main() -> int:
    """Serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three phases")
    parser.add_argument("--threads", type=int, default=2, help="of the engine's operators")
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    settings = (CHOICES + 16, arguments.threads, 4 * CHOICES, False, False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, *settings), daemon=True)
    server.start()
    try:
        port = ours.recv()
    except EOFError:
        return 1  # it has said why
    phases = asyncio.run(_measure(port, arguments.seconds))
    ours.send("stop")
    ours.recv()
    server.join(60)
    return _print(phases)


async def _measure(port: int, seconds: float) -> list[Phase]:
    schema = {"enum": ["x" * LETTERS]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    loads: dict[str, dict[str, object] | None] = {
        "alone": None,
        f"beside n={CHOICES}": {"ignore_eos": True},
        f"beside n={CHOICES} with a grammar": form,
    }
    phases = []
    await _watch(port, Phase("warm-up"), time.perf_counter() + 1)
    for name, fields in loads.items():
        phase = Phase(name)
        load = None if fields is None else asyncio.ensure_future(_load(port, fields, phase))
        await _watch(port, phase, time.perf_counter() + seconds)
        if load is not None:
            load.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await load
        await asyncio.sleep(1.0)  # until what was left is aborted
        phases.append(phase)
        print(
            name, len(phase.gaps), max(phase.gaps, default=0), phase.answers, phase.tokens, file=sys.stderr, flush=True
        )
    return phases


async def _watch(port: int, phase: Phase, until: float) -> None:
    """Run one stream after the other and note the times between their events."""
    while time.perf_counter() < until:
        body = {"prompt": WORDS, "max_tokens": WATCHED, "stream": True, "ignore_eos": True, "temperature": 0}
        reader, writer = await _posted(port, body)
        last = None
        try:
            while (line := await reader.readline()) and time.perf_counter() < until:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        phase.gaps.append(now - last)
                    last = now
        finally:
            writer.close()


async def _load(port: int, fields: dict[str, object], phase: Phase) -> None:
    """Requests for many choices, one after the other."""
    while True:
        body = {"prompt": WORDS, "max_tokens": GENERATED, "n": CHOICES, "temperature": 1, "seed": 1} | fields
        reader, writer = await _posted(port, body)
        try:
            status = int((await reader.readline()).split()[1])
            content = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        finally:
            writer.close()
        phase.answers.append(status)
        if status == 200:
            phase.tokens += content["usage"]["completion_tokens"]
        else:
            await asyncio.sleep(0.2)


async def _posted(port: int, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


def _print(phases: list[Phase]) -> int:
    table = Table("the watched stream", "gaps: p50 / p99 / max, ms", "events", "answers of the load", "its tokens")
    for phase in phases:
        spread = " / ".join(f"{1e3 * (percentile(phase.gaps, p) or 0):.1f}" for p in (50, 99, 100))
        table.add_row(phase.name, spread, str(len(phase.gaps)), str(len(phase.answers)), str(phase.tokens))
    console = Console(highlight=False)
    console.print(table)
    without, with_grammar = (max(phase.gaps, default=float("inf")) for phase in phases[1:])
    ratio = with_grammar / without
    console.print(f"largest gap: {ratio:.2f} times the one without the grammar; at most {MOST:g} is wanted")
    return 1 if ratio > MOST or any(status >= 500 for phase in phases for status in phase.answers) else 0


if __name__ == "__main__":
    sys.exit(main())
