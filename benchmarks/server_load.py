"""A server under many streams: tokens a second, gaps, what its threads compute and wait for, memory.

Run: `python -m benchmarks.server_load --clients 64 --seconds 60`; the soak: `--clients 256 --seconds 300 --leave 0.33`.
The server is a process of its own with the embedded model, prompts of 442 tokens of which 384 are shared, 64 tokens
each, in a closed loop. `--phases` tells where a step's time goes, wall and processor apart: what the first has more,
the thread waited, for the interpreter's lock or a core. Exit code 1 if any answer was a 5xx or did not end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.serving.figures import percentile

SHARED, OWN, GENERATED, VOCABULARY = 384, 58, 64, 4096
POLLED = ("/metrics", "/prefix_cache")
POLL_SECONDS, MEMORY_SECONDS = 0.25, 5.0


@dataclass
class Seen:
    """Observations of all clients."""

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    polled: dict[str, list[float]] = field(default_factory=lambda: {path: [] for path in POLLED})
    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    broken: int = 0  # streams that ended without [DONE], and were not left
    memory: list[float] = field(default_factory=list)  # MB of the server, every few seconds


def main() -> int:
    """Serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--leave", type=float, default=0.0, help="share of requests whose clients leave mid-stream")
    parser.add_argument("--max-requests", type=int, default=64, help="of the engine's batch")
    parser.add_argument("--threads", type=int, default=2, help="of the engine's operators")
    parser.add_argument("--phases", action="store_true", help="where a step's time goes; costs a little")
    parser.add_argument("--spare-nothing", action="store_true", help="let the collector look at all that is loaded")
    parser.add_argument("--whole", action="store_true", help="answers in one piece: what streaming costs")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    waiting = max(256, arguments.clients)
    settings = (arguments.max_requests, arguments.threads, waiting, arguments.phases, arguments.spare_nothing)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, *settings), daemon=True)
    server.start()
    try:
        port = ours.recv()
    except EOFError:
        return 1  # it has said why
    seen = asyncio.run(ask_all(arguments, port, psutil.Process(server.pid)))
    ours.send("stop")
    told = ours.recv()
    server.join(60)
    _print(arguments, seen, told)
    return 1 if seen.broken or any(status >= 500 for status in seen.statuses) else 0


# The server's process


def serve(
    pipe: Connection, max_requests: int, threads: int, waiting: int, with_phases: bool, spares_nothing: bool
) -> None:
    """Serve until told to stop; then say what the threads have done."""
    import threading

    import torch

    from megatron_ext.config import BatchingConfig, CacheConfig, ServerConfig, ServerSettings
    from megatron_ext.mcore import platform
    from megatron_ext.server.run import bind, build_server, build_serving

    torch.set_num_threads(threads)
    platform.initialize()
    settings = ServerSettings(
        batching=BatchingConfig(max_requests=max_requests, block_count=64 + 9 * max_requests),
        cache=CacheConfig(snapshot_slots=64),
        server=ServerConfig(port=0, max_waiting_requests=waiting, access_log=False),
    )
    serving = build_serving(settings)
    if not spares_nothing:
        from megatron_ext.memory.heap import spare_what_is_loaded

        spare_what_is_loaded()
    pauses = _collections()
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = build_server(serving, on_ready)
    listener = bind("127.0.0.1", 0)
    with _timed_phases(serving.engine, with_phases) as profiler_phases:
        loop = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        loop.start()
        ready.wait()
        clocks = {"event loop": time.pthread_getcpuclockid(loop.ident or 0)}
        begun = {name: time.clock_gettime(clock) for name, clock in clocks.items()} | {"all": time.process_time()}
        pipe.send(int(urls[0].rsplit(":", 1)[1]))
        pipe.recv()
        used = {name: time.clock_gettime(clock) - begun[name] for name, clock in clocks.items()}
        used["all"] = time.process_time() - begun["all"]
        steps = serving.engine.step_count
        server.should_exit = True
        loop.join(60)
    threads_now = psutil.Process().num_threads()
    pipe.send({"cpu": used, "steps": steps, "phases": profiler_phases, "threads": threads_now, "pauses": pauses})


def _collections() -> list[float]:
    """Seconds of each full collection from now on, during which no thread runs."""
    pauses: list[float] = []
    begun = [0.0]

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = time.perf_counter()
        elif about["generation"] == 2:
            pauses.append(time.perf_counter() - begun[0])

    gc.callbacks.append(note)
    return pauses


@contextlib.contextmanager
def _timed_phases(engine: object, is_wanted: bool):
    """Seconds of each phase of all steps so far: wall, and of the thread's processor."""
    if not is_wanted:
        yield {}
        return
    from megatron_ext.mcore import profiler_phases

    found: dict[str, list[float]] = {name: [0.0, 0.0] for name in profiler_phases.PHASES}

    @contextlib.contextmanager
    def timed(name: str):
        wall, own = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            found[name][0] += time.perf_counter() - wall
            found[name][1] += time.thread_time() - own

    plain, profiler_phases.record_function = profiler_phases.record_function, timed  # type: ignore[misc,assignment]
    try:
        with profiler_phases.named_phases(engine):  # type: ignore[arg-type]
            yield found
    finally:
        profiler_phases.record_function = plain  # type: ignore[misc]


# The clients


async def ask_all(arguments: argparse.Namespace, port: int, server: psutil.Process) -> Seen:
    """Every client asks until the time is over."""
    seen, until = Seen(), time.perf_counter() + arguments.seconds
    source = random.Random(arguments.seed)
    shared = [source.randrange(8, VOCABULARY) for _ in range(SHARED)]
    watchers = [asyncio.ensure_future(_poll(port, seen)), asyncio.ensure_future(_weigh(server, seen))]
    clients = [
        _client(port, shared, random.Random(source.random()), arguments, until, seen) for _ in range(arguments.clients)
    ]
    await asyncio.gather(*clients)
    for task in watchers:
        task.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    return seen


async def _client(
    port: int, shared: list[int], source: random.Random, arguments: argparse.Namespace, until: float, seen: Seen
) -> None:
    while time.perf_counter() < until:
        prompt = shared + [source.randrange(8, VOCABULARY) for _ in range(OWN)]
        leaves_after = source.randrange(1, GENERATED // 2) if source.random() < arguments.leave else None
        await _ask(port, prompt, leaves_after, seen, is_streamed=not arguments.whole)


async def _ask(port: int, prompt: list[int], leaves_after: int | None, seen: Seen, *, is_streamed: bool) -> None:
    """Send one request by hand, since a client's library would be measured too."""
    body = {"prompt": prompt, "max_tokens": GENERATED, "stream": is_streamed, "ignore_eos": True, "temperature": 0}
    started = time.perf_counter()
    reader, writer = await _posted(port, json.dumps(body).encode())
    try:
        status = int((await reader.readline()).split()[1])
        seen.statuses[status] += 1
        if status != 200:
            await asyncio.sleep(0.2)
            return
        if not is_streamed:
            content = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            seen.tokens += content["usage"]["completion_tokens"]
            return
        last, count = started, 0
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            (seen.gaps if count else seen.first).append(now - last)
            last, count = now, count + 1
            seen.tokens += 1
            if count == leaves_after:
                seen.left += 1
                return
        seen.broken += 1
    finally:
        writer.close()


async def _posted(port: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def _poll(port: int, seen: Seen) -> None:
    while True:
        for path in POLLED:
            started = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            status = int((await reader.readline()).split()[1])
            await reader.read()
            writer.close()
            seen.statuses[status] += 1
            seen.polled[path].append(time.perf_counter() - started)
        await asyncio.sleep(POLL_SECONDS)


async def _weigh(server: psutil.Process, seen: Seen) -> None:
    while True:
        seen.memory.append(server.memory_info().rss / 2**20)
        await asyncio.sleep(MEMORY_SECONDS)


def _print(arguments: argparse.Namespace, seen: Seen, told: dict[str, object]) -> None:
    table = Table(f"{arguments.clients} clients, {arguments.seconds:g} s", "")
    table.add_row("tokens a second", f"{seen.tokens / arguments.seconds:,.0f}")
    for name, values in (("first token", seen.first), ("gap", seen.gaps), *seen.polled.items()):
        spread = " / ".join(f"{1e3 * (percentile(values, p) or 0):.1f}" for p in (50, 99, 100))
        table.add_row(f"{name}: p50 / p99 / max, ms", spread)
    table.add_row("answers by status", ", ".join(f"{status}: {n}" for status, n in sorted(seen.statuses.items())))
    table.add_row("left mid-stream; broken", f"{seen.left}; {seen.broken}")
    table.add_row("memory of the server, MB, over time", " ".join(f"{one:,.0f}" for one in _few(seen.memory)))
    cpu, steps = told["cpu"], told["steps"]
    assert isinstance(cpu, dict), told
    assert isinstance(steps, int), told
    table.add_row("event loop, us a token (processor)", f"{1e6 * cpu['event loop'] / max(1, seen.tokens):.0f}")
    table.add_row("processor of the whole server, us a token", f"{1e6 * cpu['all'] / max(1, seen.tokens):.0f}")
    table.add_row("threads of the server", str(told["threads"]))
    pauses = told["pauses"]
    assert isinstance(pauses, list), told
    table.add_row("full collections, longest in ms", f"{len(pauses)}, {1e3 * max(pauses, default=0):.1f}")
    profiler_phases = told["phases"]
    assert isinstance(profiler_phases, dict), told
    for name, (wall, own) in profiler_phases.items():
        per_step = 1e3 / max(1, steps)
        table.add_row(f"{name}: wall / processor, ms a step", f"{wall * per_step:.2f} / {own * per_step:.2f}")
    console = Console(highlight=False)
    console.print(table)


def _few(values: list[float], most: int = 12) -> list[float]:
    """Select some of the items, including the first and the last."""
    step = max(1, len(values) // most)
    return [*values[:-1:step], *values[-1:]]


if __name__ == "__main__":
    sys.exit(main())
