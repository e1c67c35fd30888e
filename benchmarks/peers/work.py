"""Workloads of peers, and how they are timed; standard library only, since each peer has an environment of its own.

shared:  prompts that begin with the same tokens and end in 128 of their own, one or eight at once
unique:  prompts with nothing in common, eight at once
chat:    eight conversations of four turns, one request at a time
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from benchmarks.cases import Figure, Run, token_ids

OWN, GENERATED = 128, 32
CHATS, TURNS, SAID, ANSWERED = 8, 4, 200, 64


@dataclass(frozen=True)
class Size:
    """Amount of work."""

    prefixes: tuple[int, ...] = (2_048, 8_192)
    requests: int = 16
    unique: int = 2_176
    chats: int = CHATS
    repeats: int = 3  # of a cold request, of which a single one says too little


QUICK = Size(prefixes=(256, 512), requests=4, unique=300, chats=2, repeats=1)


@dataclass
class Timed:
    """Times of one request, in seconds after its submission, and its output."""

    prompt: int
    arrivals: list[float] = field(default_factory=list)  # of each step's tokens
    cached: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]


class Peer(Protocol):
    """Engine under test."""

    def forget(self) -> None:
        """Empty the cache."""

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a greedy request of exactly `count` tokens."""

    def step(self) -> Iterable[tuple[int, list[int], int, bool]]:
        """Compute a step; return key, new tokens, skipped prompt tokens and end of each request with new tokens."""


def shared(prefix: int, requests: int) -> list[list[int]]:
    """Return prompts after one prefix."""
    return [token_ids(prefix, f"prefix {prefix}") + token_ids(OWN, f"own {prefix} {i}") for i in range(requests)]


def unique(length: int, requests: int) -> list[list[int]]:
    """Return prompts with nothing in common."""
    return [token_ids(length, f"unique {length} {i}") for i in range(requests)]


def serve(
    peer: Peer, prompts: list[list[int]], at_once: int, count: int | list[int] = GENERATED
) -> tuple[list[Timed], float]:
    """Keep `at_once` requests in flight until all have ended; return their times, and the duration in seconds.

    Args:
        peer: Engine.
        prompts: Prompts, in order of submission.
        at_once: Requests in flight.
        count: Tokens that each request generates, or a number for each.
    """
    waiting, live = list(enumerate(prompts)), {}
    counts = count if isinstance(count, list) else [count] * len(prompts)
    done: dict[int, Timed] = {}
    started: dict[int, float] = {}
    begin = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < at_once:
            key, prompt = waiting.pop(0)
            live[key], started[key] = Timed(len(prompt)), time.perf_counter()
            peer.submit(key, prompt, counts[key])
        for key, new, cached, has_ended in peer.step():
            one, now = live[key], time.perf_counter() - started[key]
            one.arrivals += [now] * bool(new)
            one.tokens += new
            if has_ended:
                one.cached = cached
                done[key] = live.pop(key)
    return [done[key] for key in sorted(done)], time.perf_counter() - begin


def figures(records: list[Timed], seconds: float) -> dict[str, Figure]:
    """Return the columns of a row."""
    later = [1e3 * one.first for one in records[1:]]
    return {
        "first ttft, ms": 1e3 * records[0].first,
        "later ttft, ms": statistics.median(later) if later else None,
        "worst ttft, ms": max(later, default=None),
        "generated tokens/s": sum(len(one.tokens) for one in records) / seconds,
        "prompt tokens": sum(one.prompt for one in records),
        "skipped tokens": sum(one.cached for one in records),
    }


def alone(peer: Peer, prompts: list[list[int]], repeats: int) -> dict[str, Figure]:
    """Serve requests one at a time; repeat the first, uncached one, and take the median of its times."""
    firsts = []
    for _ in range(repeats - 1):
        ((record,), _) = serve(peer, prompts[:1], 1)
        firsts.append(1e3 * record.first)
        peer.forget()
    found = figures(*serve(peer, prompts, 1))
    return found | {"first ttft, ms": statistics.median([*firsts, found["first ttft, ms"]])}


def chat(peer: Peer, chats: int) -> Iterator[tuple[float, int]]:
    """Serve turn after turn of all conversations; each begins with what was said and answered before.

    Yields:
        Median time to first token in seconds, and computed prompt tokens, of each turn.
    """
    histories: list[list[int]] = [[] for _ in range(chats)]
    for turn in range(TURNS):
        records = []
        for number, history in enumerate(histories):
            history += token_ids(SAID, f"chat {number} {turn}")
            ((record,), _) = serve(peer, [list(history)], 1, ANSWERED)
            history += record.tokens
            records.append(record)
        computed = sum(one.prompt - one.cached for one in records)
        yield statistics.median(one.first for one in records), computed


def _chat_rows(run: Run, peer: Peer, chats: int) -> None:
    total = 0
    for turn, (ttft, computed) in enumerate(chat(peer, chats), 1):
        run.row(f"chat, turn {turn}", {"median ttft, ms": 1e3 * ttft, "computed tokens": computed})
        total += computed
    run.row("chat, all turns", {"computed tokens": total})


def measure(run: Run, peer: Peer) -> None:
    """Run all workloads; the first one warms up."""
    size = QUICK if run.is_quick else Size()

    def report(name: str, work: Callable[[], dict[str, Figure]]) -> None:
        peer.forget()
        run.row(name, work())

    serve(peer, unique(600, 3), 2)
    for prefix in size.prefixes:
        one = shared(prefix, size.requests)
        report(f"{prefix:,} shared, 1 at once", partial(alone, peer, one, size.repeats))
        report(f"{prefix:,} shared, 8 at once", lambda one=one: figures(*serve(peer, one, 8)))
    report("unique, 8 at once", lambda: figures(*serve(peer, unique(size.unique, size.requests), 8)))
    peer.forget()
    _chat_rows(run, peer, size.chats)
