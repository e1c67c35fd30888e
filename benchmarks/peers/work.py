"""The workloads and how they are timed; standard library only, since each peer has an environment of its own.

Run by `benchmarks.bench`, as `python -m benchmarks.peers.PEER --model DIR --figures FILE.json --threads N [--quick]`.

shared:  prompts that begin with the same tokens and end in 128 of their own, one or eight at once
unique:  prompts with nothing in common, eight at once
chat:    eight conversations of four turns, one request at a time
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

VOCABULARY = 4096
OWN, GENERATED = 128, 32
CHATS, TURNS, SAID, ANSWERED = 8, 4, 200, 64


@dataclass(frozen=True)
class Size:
    """Amount of work."""

    prefixes: tuple[int, ...] = (2_048, 8_192)
    requests: int = 16
    unique: int = 2_176
    chats: int = CHATS
    repeats: int = 3  # of what a single request says too little about


QUICK = Size(prefixes=(256, 512), requests=4, unique=300, chats=2, repeats=1)


def arguments() -> argparse.Namespace:
    """Parse a peer's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--figures", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


@dataclass
class Timed:
    """Times of one request, in seconds from its submission on, and its output."""

    prompt: int
    first: float | None = None
    last: float | None = None
    cached: int = 0
    tokens: list[int] = field(default_factory=list)


class Peer(Protocol):
    """An engine under test."""

    def forget(self) -> None:
        """Empty its cache."""

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a greedy request of exactly `count` tokens."""

    def step(self) -> Iterable[tuple[int, list[int], int, bool]]:
        """Compute something: (key, new tokens, prompt tokens skipped, whether it has ended) of each that moved."""


def ids(count: int, name: str) -> list[int]:
    """Token ids, the same in every process."""
    source = random.Random(name)
    return [source.randrange(8, VOCABULARY) for _ in range(count)]


def shared(prefix: int, requests: int) -> list[list[int]]:
    """Prompts after one prefix."""
    return [ids(prefix, f"prefix {prefix}") + ids(OWN, f"own {prefix} {i}") for i in range(requests)]


def unique(length: int, requests: int) -> list[list[int]]:
    """Prompts with nothing in common."""
    return [ids(length, f"unique {length} {i}") for i in range(requests)]


def serve(peer: Peer, prompts: list[list[int]], at_once: int, count: int = GENERATED) -> tuple[list[Timed], float]:
    """Keep so many requests in flight until all have ended; each one's times, and the seconds of it all."""
    waiting, live = list(enumerate(prompts)), {}
    done: dict[int, Timed] = {}
    started: dict[int, float] = {}
    begin = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < at_once:
            key, prompt = waiting.pop(0)
            live[key], started[key] = Timed(len(prompt)), time.perf_counter()
            peer.submit(key, prompt, count)
        for key, new, cached, has_ended in peer.step():
            one, now = live[key], time.perf_counter() - started[key]
            one.first = now if one.first is None and new else one.first
            one.tokens += new
            if has_ended:
                one.last, one.cached = now, cached
                done[key] = live.pop(key)
    return [done[key] for key in sorted(done)], time.perf_counter() - begin


def figures(records: list[Timed], seconds: float) -> dict[str, object]:
    """Figures to compare."""
    later = [one.first for one in records[1:]]
    return {
        "first_ttft": records[0].first,
        "later_ttft": statistics.median(later) if later else None,
        "worst_ttft": max(later, default=None),
        "generated_per_second": sum(len(one.tokens) for one in records) / seconds,
        "prompt_tokens": sum(one.prompt for one in records),
        "skipped_tokens": sum(one.cached for one in records),
        "outputs": [one.tokens[:8] for one in records],
    }


def chat(peer: Peer, chats: int) -> list[dict[str, object]]:
    """Turn after turn of all conversations; each turn begins with what was said and answered before."""
    said: list[list[int]] = [[] for _ in range(chats)]
    table = []
    for turn in range(TURNS):
        records = []
        for number, history in enumerate(said):
            history += ids(SAID, f"chat {number} {turn}")
            ((record,), _) = serve(peer, [list(history)], 1, ANSWERED)
            history += record.tokens
            records.append(record)
        prompt, cached = sum(one.prompt for one in records), sum(one.cached for one in records)
        table.append({"ttft": statistics.median(one.first for one in records), "computed": prompt - cached})
    return table


def alone(peer: Peer, prompts: list[list[int]], repeats: int) -> dict[str, object]:
    """Serve requests one at a time; repeat the first, uncached one, and take the median of its times."""
    firsts = []
    for _ in range(repeats - 1):
        ((record,), _) = serve(peer, prompts[:1], 1)
        firsts.append(record.first)
        peer.forget()
    records, seconds = serve(peer, prompts, 1)
    return figures(records, seconds) | {"first_ttft": statistics.median([*firsts, records[0].first])}


def run(peer: Peer, options: argparse.Namespace, /, **about: object) -> dict[str, object]:
    """Run all workloads, write figures as they come, and return them."""
    size = QUICK if options.quick else Size()
    result: dict[str, object] = {**about, "size": asdict(size)}
    for name, work in cases(peer, size):
        peer.forget()
        start = time.perf_counter()
        result[name] = work()
        print(f"  {about['peer']}: {name}, {time.perf_counter() - start:.1f} s", flush=True)
        options.figures.write_text(json.dumps(result, indent=1), "utf-8")
    return result


def cases(peer: Peer, size: Size) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and work of each; the first one warms up."""
    yield "warm-up", lambda: figures(*serve(peer, unique(600, 3), 2))
    for prefix in size.prefixes:
        prompts = shared(prefix, size.requests)
        yield f"shared {prefix}, 1 at once", lambda p=prompts: alone(peer, p, size.repeats)
        yield f"shared {prefix}, 8 at once", lambda p=prompts: figures(*serve(peer, p, 8))
    yield "unique, 8 at once", lambda: figures(*serve(peer, unique(size.unique, size.requests), 8))
    yield "chat", lambda: chat(peer, size.chats)
