"""Server of the embedded model in a process of its own, under many streams, or beside requests with a costly grammar.

Clients are written by hand, since a client's library would be measured, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from unittest import mock

import psutil

from benchmarks.cases import VOCABULARY, Figure, Run, case, token_ids
from benchmarks.measuring import percentile

SHARED, OWN, GENERATED = 384, 58, 64
POLLED = ("/metrics", "/prefix_cache")
POLL_SECONDS, MEMORY_SECONDS = 0.25, 5.0
CHOICES, WATCHED = 64, 384  # choices of a request beside the watched stream; tokens of that stream
LETTERS = 60_000  # of the one string that the grammar allows
Report = dict[str, object]
"""Figures that the server reports at its end."""


# The server's process


def serve(pipe: Connection, max_requests: int, waiting: int, phases: bool, spare_heap: bool) -> None:
    """Serve until told to stop; then report what the threads have used."""
    from megatron_ext.config import BatchingConfig, CacheConfig, ServerConfig, ServerSettings
    from megatron_ext.mcore import platform
    from megatron_ext.memory.heap import freeze_loaded_objects
    from megatron_ext.server.run import bind, build_server, build_serving

    platform.initialize()
    settings = ServerSettings(
        batching=BatchingConfig(max_requests=max_requests, block_count=64 + 9 * max_requests),
        cache=CacheConfig(snapshot_slots=64),
        server=ServerConfig(port=0, max_waiting_requests=waiting, access_log=False),
    )
    serving = build_serving(settings)
    if spare_heap:
        freeze_loaded_objects()
    pauses = _full_collections()
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = build_server(serving, on_ready)
    with _timed_phases(serving.engine.inference_engine, phases) as found:
        loop = threading.Thread(target=server.run, kwargs={"sockets": [bind("127.0.0.1", 0)]}, daemon=True)
        loop.start()
        ready.wait()
        clock = time.pthread_getcpuclockid(loop.ident or 0)
        begun = time.clock_gettime(clock), time.process_time()
        pipe.send(int(urls[0].rsplit(":", 1)[1]))
        pipe.recv()
        cpu = time.clock_gettime(clock) - begun[0], time.process_time() - begun[1]
        steps = serving.engine.counts()[1].steps
        server.should_exit = True
        loop.join(60)
    threads = psutil.Process().num_threads()
    pipe.send({"cpu": cpu, "steps": steps, "phases": found, "threads": threads, "pauses": pauses})


def _full_collections() -> list[float]:
    """Return a list that gets the seconds of each full garbage collection, during which no thread runs."""
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
def _timed_phases(engine: object, is_wanted: bool) -> Iterator[dict[str, list[float]]]:
    """Record the seconds of each phase of all steps: wall, and of the thread's processor."""
    if not is_wanted:
        yield {}
        return
    from megatron_ext.mcore import profiler_phases

    found: dict[str, list[float]] = {name: [0.0, 0.0] for name in profiler_phases.PHASES}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        wall, own = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            found[name][0] += time.perf_counter() - wall
            found[name][1] += time.thread_time() - own

    with (
        mock.patch.object(profiler_phases, "record_function", timed),
        profiler_phases.named_phases(engine, _nothing, _nothing),
    ):
        yield found


def _nothing() -> None:
    """Do nothing before a step, and at the end."""


@contextlib.asynccontextmanager
async def serving_process(
    report: Report, max_requests: int, waiting: int, *, phases: bool = False, spare_heap: bool = True
) -> AsyncIterator[tuple[int, psutil.Process]]:
    """Run the server inside this context; its figures are in `report` afterwards.

    Yields:
        Port and process of the server.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, max_requests, waiting, phases, spare_heap)
    server = context.Process(target=serve, args=arguments, daemon=True)
    server.start()
    theirs.close()
    try:
        port = await asyncio.to_thread(ours.recv)
    except EOFError:
        raise RuntimeError("the server has failed; its error is above") from None
    yield port, psutil.Process(server.pid)
    ours.send("stop")
    report.update(await asyncio.to_thread(ours.recv))
    server.join(60)


# The clients


@contextlib.asynccontextmanager
async def request(
    port: int, path: str, body: dict[str, object] | bytes | None = None
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request, with a body by POST; the answer can be read inside this context."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\n" + content)
    try:
        yield reader
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    """Read the status line."""
    return int((await reader.readline()).split()[1])


async def content_of(reader: asyncio.StreamReader) -> dict[str, dict[str, int]]:
    """Read an answer in one piece."""
    found: dict[str, dict[str, int]] = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    return found


@dataclass
class Seen:
    """Observations of all clients; times in seconds."""

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    polled: dict[str, list[float]] = field(default_factory=lambda: {path: [] for path in POLLED})
    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    broken: int = 0  # streams that ended without [DONE], and were not left
    memory: list[float] = field(default_factory=list)  # MB of the server, every few seconds


@case("serving", quick={"seconds": 3.0, "clients": 4})
def streams(
    run: Run,
    clients: int = 64,
    seconds: float = 60.0,
    leave: float = 0.0,
    max_requests: int = 64,
    phases: bool = False,
    spare_heap: bool = True,
    whole: bool = False,
    seed: int = 1,
) -> None:
    """Server under streams: tokens a second, gaps, processor time of its threads, memory; no stream may break.

    A closed loop of prompts of 442 tokens, 384 of them shared, 64 tokens each. `leave`: share of requests whose clients
    leave mid-stream; `phases`: time of a step by phase, wall and processor; `whole`: answers in one piece. Soak:
    clients=256 seconds=300 leave=0.33.
    """
    seen, report = Seen(), Report()

    async def measure() -> None:
        source = random.Random(seed)
        shared = token_ids(SHARED, f"shared {seed}")
        async with serving_process(report, max_requests, max(256, clients), phases=phases, spare_heap=spare_heap) as (
            port,
            server,
        ):
            until = time.perf_counter() + seconds
            watchers = [asyncio.ensure_future(one) for one in (_poll(port, seen), _weigh(server, seen))]
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(lambda: [one.cancel() for one in watchers])
                loops = [
                    _client(port, shared, random.Random(source.random()), (leave, whole), until, seen)
                    for _ in range(clients)
                ]
                await asyncio.gather(*loops)

    asyncio.run(measure())
    _report(run, seen, report, seconds)


async def _client(
    port: int, shared: list[int], source: random.Random, how: tuple[float, bool], until: float, seen: Seen
) -> None:
    leave, whole = how
    while time.perf_counter() < until:
        prompt = shared + [source.randrange(8, VOCABULARY) for _ in range(OWN)]
        leaves_after = source.randrange(1, GENERATED // 2) if source.random() < leave else None
        body = {"prompt": prompt, "max_tokens": GENERATED, "stream": not whole, "ignore_eos": True, "temperature": 0}
        started = time.perf_counter()
        async with request(port, "/v1/completions", body) as reader:
            status = await status_of(reader)
            seen.statuses[status] += 1
            if status != 200:
                await asyncio.sleep(0.2)
            elif whole:
                seen.tokens += (await content_of(reader))["usage"]["completion_tokens"]
            else:
                await _read_stream(reader, started, leaves_after, seen)


async def _read_stream(reader: asyncio.StreamReader, started: float, leaves_after: int | None, seen: Seen) -> None:
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


async def _poll(port: int, seen: Seen) -> None:
    while True:
        for path in POLLED:
            started = time.perf_counter()
            async with request(port, path) as reader:
                seen.statuses[await status_of(reader)] += 1
                await reader.read()
            seen.polled[path].append(time.perf_counter() - started)
        await asyncio.sleep(POLL_SECONDS)


async def _weigh(server: psutil.Process, seen: Seen) -> None:
    while True:
        seen.memory.append(server.memory_info().rss / 2**20)
        await asyncio.sleep(MEMORY_SECONDS)


def _spread(seconds: list[float]) -> dict[str, Figure]:
    return {f"{'max' if p == 100 else f'p{p}'}, ms": 1e3 * (percentile(seconds, p) or 0.0) for p in (50, 99, 100)}


def _report(run: Run, seen: Seen, report: Report, seconds: float) -> None:
    for name, values in (("first token", seen.first), ("gap", seen.gaps), *seen.polled.items()):
        run.row(name, _spread(values))
    pauses: list[float] = report["pauses"]
    run.row("full collections", {"count": len(pauses), "max, ms": 1e3 * max(pauses, default=0.0)})
    errors = sum(count for status, count in seen.statuses.items() if status >= 500)
    run.row("answers", {"count": sum(seen.statuses.values()), "no 5xx": not errors, "none broken": not seen.broken})
    run.row("left mid-stream", {"count": seen.left})
    run.row("tokens", {"count": seen.tokens, "a second": seen.tokens / seconds})
    loop, whole = report["cpu"]
    for name, used in (("processor of the event loop", loop), ("processor of the server", whole)):
        run.row(name, {"us a token": 1e6 * used / max(1, seen.tokens)})
    run.row("threads of the server", {"count": report["threads"]})
    run.row(
        "memory of the server", {"first, MB": seen.memory[0], "max, MB": max(seen.memory), "last, MB": seen.memory[-1]}
    )
    phases: dict[str, list[float]] = report["phases"]
    for name, (wall, own) in phases.items():
        a_step = 1e3 / max(1, report["steps"])
        run.row(f"phase {name}", {"wall, ms a step": wall * a_step, "processor, ms a step": own * a_step})


# A stream beside a costly grammar (SE-10)


@case("serving", in_bench=True, quick={"seconds": 3.0, "choices": 4, "letters": 500})
def grammar(run: Run, seconds: float = 20.0, choices: int = CHOICES, letters: int = LETTERS) -> None:
    """Gaps of a stream alone, beside requests for 64 choices, and beside the same with a costly grammar."""
    schema = {"enum": ["x" * letters]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    loads = {"alone": None, f"beside n={choices}": {"ignore_eos": True}, "beside the same with a grammar": form}
    largest = []

    async def measure() -> None:
        async with serving_process({}, choices + 16, 4 * choices) as (port, _):
            await watch(port, [], time.perf_counter() + 1)  # warms up
            for name, fields in loads.items():
                gaps: list[float] = []
                statuses: Counter[int] = Counter()
                load = asyncio.ensure_future(_load(port, {"n": choices, **fields}, statuses)) if fields else None
                await watch(port, gaps, time.perf_counter() + seconds)
                if load is not None:
                    load.cancel()
                    await asyncio.gather(load, return_exceptions=True)
                await asyncio.sleep(1.0)  # until the aborts of the load have arrived
                errors = sum(count for status, count in statuses.items() if status >= 500)
                row = {"gaps": len(gaps), **_spread(gaps), "answers of the load": sum(statuses.values())}
                run.row(name, {**row, "no 5xx": not errors})
                largest.append(max(gaps, default=float("inf")))

    asyncio.run(measure())
    run.row("largest gap, with the grammar / without", {"ratio": largest[2] / largest[1]})


PROMPT = [17, 230, 41, 512, 77, 90, 1033, 8]


async def watch(port: int, gaps: list[float], until: float) -> None:
    """Run one stream after the other and record the times between their events."""
    while time.perf_counter() < until:
        body = {"prompt": PROMPT, "max_tokens": WATCHED, "stream": True, "ignore_eos": True, "temperature": 0}
        async with request(port, "/v1/completions", body) as reader:
            last = None
            while (line := await reader.readline()) and time.perf_counter() < until:
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now


async def _load(port: int, fields: dict[str, object], statuses: Counter[int]) -> None:
    """Send requests for many choices, one after the other."""
    while True:
        body = {"prompt": PROMPT, "max_tokens": GENERATED, "temperature": 1, "seed": 1} | fields
        async with request(port, "/v1/completions", body) as reader:
            status = await status_of(reader)
            statuses[status] += 1
            await reader.read()
        if status != 200:
            await asyncio.sleep(0.2)
