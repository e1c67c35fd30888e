"""Standard rows: the same work for each peer and size, and how it is timed.

shared:  prompts that begin with the same tokens and end in `OWN` of their own, one or eight at once
unique:  prompts with nothing in common, eight at once
decode:  steps in which 1 to 16 requests decode after short prompts
chat:    conversations of four turns, one request at a time

Standard library only, since each peer has an environment of its own.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.cases import CASES, Case, Figure, Run, token_ids
from benchmarks.peers.sizes import ANSWERED, OWN, SAID, SIZES, TURNS, Size

AT_ONCE = 8
FIRST, LATER, RATE, STEP, TTFT = (
    "first ttft, ms",
    "later ttft, ms",
    "generated tokens/s",
    "step, ms",
    "median ttft, ms",
)
UNIQUE = f"unique, {AT_ONCE} at once"
PROBE = "tokens after a prompt"
WEIGHTS, READ = "reading as many bytes as the weights", "weights read, GB/s"
READ_ONCE = "step / weights read once"
PRELOADED = "preloaded"


def shared_row(prefix: int, at_once: int = 1) -> str:
    """Return the name of the row of prompts after a shared prefix."""
    return f"{prefix:,} shared, {at_once} at once"


def decode_row(requests: int) -> str:
    """Return the name of the row of decode steps."""
    return f"decode of {requests}"


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
    """Engine under test; each step's tokens come from `step`, as they are computed."""

    def forget(self, shared: int = 0, *, continues: bool = False) -> None:
        """Empty the cache, before a row.

        Args:
            shared: Tokens that all prompts of the row begin with, for peers that have to be told.
            continues: Whether prompts continue earlier requests of the row.
        """

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """Queue a greedy request of exactly `count` tokens."""

    def step(self) -> Iterable[tuple[int, list[int], int, bool]]:
        """Compute a step; return key, new tokens, skipped prompt tokens and end of each request with new tokens."""


def serve(peer: Peer, prompts: list[list[int]], at_once: int, count: int | list[int]) -> tuple[list[Timed], float]:
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


def step_seconds(peer: Peer, prompts: list[list[int]], steps: int) -> float:
    """Return the median time in which each of the requests gets a token, while all of them decode."""
    begun, moments = [0] * len(prompts), []
    counts = list(begun)
    for key, prompt in enumerate(prompts):
        peer.submit(key, prompt, steps + len(prompts) + 2)  # prefills may take a step each
    live = set(range(len(prompts)))
    while live:
        for key, new, _, has_ended in peer.step():
            counts[key] += len(new)
            live -= {key} if has_ended else set()
        if not moments and min(counts):
            begun = list(counts)
            moments = [time.perf_counter()]
        elif moments and min(now - then for now, then in zip(counts, begun, strict=True)) >= len(moments):
            moments.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return statistics.median(gaps[:steps])


def figures(records: list[Timed], seconds: float) -> dict[str, Figure]:
    """Return the columns of a row of requests."""
    later = [1e3 * one.first for one in records[1:]]
    return {
        FIRST: 1e3 * records[0].first,
        LATER: statistics.median(later) if later else None,
        "worst ttft, ms": max(later, default=None),
        RATE: sum(len(one.tokens) for one in records) / seconds,
        "prompt tokens": sum(one.prompt for one in records),
        "skipped tokens": sum(one.cached for one in records),
    }


def chat(peer: Peer, chats: int, vocabulary: int) -> Iterator[tuple[float, int]]:
    """Serve turn after turn of all conversations; each begins with its earlier messages and answers.

    Yields:
        Median time to first token in seconds, and computed prompt tokens, of each turn.
    """
    histories: list[list[int]] = [[] for _ in range(chats)]
    for turn in range(TURNS):
        records = []
        for number, history in enumerate(histories):
            history += token_ids(SAID, f"chat {number} {turn}", vocabulary)
            ((record,), _) = serve(peer, [list(history)], 1, ANSWERED)
            history += record.tokens
            records.append(record)
        computed = sum(one.prompt - one.cached for one in records)
        yield statistics.median(one.first for one in records), computed


class StandardRows:
    """Standard rows of one peer and size.

    Args:
        run: Run that the rows are reported to.
        peer: Engine.
        size: Model and work.
        is_sequential: True for a peer that serves one request after the other; it has no rows of several at once.
    """

    def __init__(self, run: Run, peer: Peer, size: Size, *, is_sequential: bool = False) -> None:
        self._run, self._peer, self._size, self._is_sequential = run, peer, size, is_sequential

    def measure(self) -> None:
        """Measure all rows."""
        work = self._size.work
        self._warm_up()
        for prefix in work.prefixes:
            self._alone(prefix)
            if not self._is_sequential:
                prompts = self._shared(prefix, work.together)
                self._together(shared_row(prefix, AT_ONCE), prompts, prefix)
        if not self._is_sequential:
            self._together(UNIQUE, [self._tokens(work.unique, f"unique {i}") for i in range(work.unrelated)])
        for requests in work.batches:
            prompts = [self._tokens(OWN // 2, f"decode {requests} {i}") for i in range(requests)]
            self._peer.forget()
            seconds = step_seconds(self._peer, prompts, work.steps)
            rate = self._size.shape.step_bytes / seconds / 1e9
            self._run.row(decode_row(requests), {STEP: 1e3 * seconds, READ: rate})
        if work.chats:
            self._chats(work.chats)

    def _warm_up(self) -> None:
        """Serve what nothing is timed of; its tokens show whether peers compute the same model."""
        prompts = [self._tokens(OWN, f"warm up {i}") for i in range(2)]
        records, _ = serve(self._peer, prompts, 1 if self._is_sequential else 2, AT_ONCE)
        self._run.row(PROBE, {PROBE: " ".join(map(str, records[0].tokens))})

    def _tokens(self, count: int, name: str) -> list[int]:
        return token_ids(count, f"{name} of {count}", self._size.shape.vocabulary)

    def _shared(self, prefix: int, requests: int) -> list[list[int]]:
        return [self._tokens(prefix, "prefix") + self._tokens(OWN, f"own {prefix} {i}") for i in range(requests)]

    def _alone(self, prefix: int) -> None:
        """Serve requests one at a time; repeat the first, uncached one, and take the median of its times."""
        work, firsts = self._size.work, []
        prompts = self._shared(prefix, work.alone)
        for _ in range(work.cold - 1):
            self._peer.forget(prefix)
            ((record,), _) = serve(self._peer, prompts[:1], 1, 1)
            firsts.append(1e3 * record.first)
        self._peer.forget(prefix)
        records, seconds = serve(self._peer, prompts, 1, work.generated)
        first = statistics.median([*firsts, 1e3 * records[0].first])
        self._run.row(shared_row(prefix), figures(records, seconds) | {FIRST: first})

    def _together(self, name: str, prompts: list[list[int]], shared: int = 0) -> None:
        self._peer.forget(shared)
        self._run.row(name, figures(*serve(self._peer, prompts, AT_ONCE, self._size.work.generated)))

    def _chats(self, chats: int) -> None:
        self._peer.forget(continues=True)
        total = 0
        for turn, (ttft, computed) in enumerate(chat(self._peer, chats, self._size.shape.vocabulary), 1):
            self._run.row(f"chat, turn {turn}", {TTFT: 1e3 * ttft, "computed tokens": computed})
            total += computed
        self._run.row("chat, all turns", {"computed tokens": total})


Measure = Callable[[Run, str, Size], None]


def standard(*, reads_published: bool = False, **attributes: object) -> Callable[[Measure], Measure]:
    """Register a function of a run, a model's directory and a size as the case `standard.FUNCTION_SIZE` of each size.

    Args:
        reads_published: True to measure published models, too.
        attributes: Attributes of the cases.
    """

    def register(measure: Measure) -> Measure:
        for key, size in SIZES.items():
            if size.published and not reads_published:
                continue
            name = f"standard.{measure.__name__}_{key}"
            CASES[name] = Case(
                name,
                _of_size(measure, size),
                in_bench=True,
                model=key,
                published=size.published,
                **attributes,  # type: ignore[arg-type]
            )
        return measure

    return register


OURS, OURS_INT8 = "ours", "ours_int8"


def _of_size(measure: Measure, size: Size) -> Callable[[Run, str], None]:
    def measure_size(run: Run, model: str = "") -> None:
        measure(run, model, size.quick() if run.is_quick else size)

    measure_size.__doc__ = f"{size.title}: {inspect.getdoc(measure)}"
    measure_size.__module__ = measure.__module__
    return measure_size
