"""Limits on prefills in a step: times to first token, pace and throughput per setting, in turns in one process.

Run: `python -m benchmarks.prefills_per_step` (`--quick`, `--markdown`: as docs/batching.md has it). The settings are
the tokens of prefill with which a step begins no other one, and limits of how many requests prefill in a step. A closed
loop keeps eight requests in flight, whose answers have 16 to 48 tokens, so that their ends drift apart; short prompts
come all at once.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import header, keep_figures, part_arguments
from benchmarks.nemotron_shaped import VOCABULARY, Pair, build_pair
from megatron_ext.config import CacheConfig, RequestParams, batching
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine

GENERATED, AT_ONCE = range(16, 49), 8  # tokens of an answer; requests in flight


@dataclass(frozen=True)
class Setting:
    """Limit on the prefills of a step.

    Attributes:
        name: Name in the table.
        enough: Tokens with which a step begins no other prefill; None is no limit.
        most: Requests that prefill in a step; 0 is no limit. Given, `enough` says nothing.
    """

    name: str
    enough: int | None = None
    most: int | None = None


SETTINGS = (
    Setting("all at once (0)", most=0),
    Setting("1", most=1),
    Setting("2", most=2),
    Setting("4", most=4),
    Setting("enough with 16 tokens", enough=16),
    Setting("enough with 64 tokens, the default", enough=64),
    Setting("enough with 256 tokens", enough=256),
)


@dataclass(frozen=True)
class Work:
    """Requests of equal length.

    Attributes:
        requests: Number of requests.
        shared: Tokens that all begin with; cached before anything is timed.
        own: Tokens of each.
        at_once: Requests in flight.
    """

    requests: int
    shared: int
    own: int
    at_once: int

    def prompts(self, name: str) -> list[list[int]]:
        """Prompts unique to a name, after the shared prefix."""
        source = random.Random(f"prefix {self.shared}")
        prefix = [source.randrange(8, VOCABULARY) for _ in range(self.shared)]
        source = random.Random(name)
        return [prefix + [source.randrange(8, VOCABULARY) for _ in range(self.own)] for _ in range(self.requests)]


WORK = {
    "128 behind 2,048 cached": Work(48, 2_048, 128, AT_ONCE),
    "600, nothing in common": Work(32, 0, 600, AT_ONCE),
    "64 short ones of 10 at once": Work(64, 0, 10, 64),
}
QUICK = {name: Work(4, min(one.shared, 128), min(one.own, 64), one.at_once) for name, one in WORK.items()}


@dataclass
class Seen:
    """Seconds of all requests of a setting."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # the longest between two tokens, of each request
    tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """Milliseconds, and tokens a second."""
        ordered = sorted(self.ttft)
        return {
            "mean ttft": 1e3 * statistics.mean(ordered),
            "p99 ttft": 1e3 * ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
            "longest gap": 1e3 * max(self.gaps),
            "median of longest gaps": 1e3 * statistics.median(self.gaps),
            "tokens/s": self.tokens / self.seconds,
        }


def main() -> None:
    """Measure and print."""
    parser = part_arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair = build_pair(platform.device(), torch.float32)
    console = Console(highlight=False, width=140)
    console.print(header(platform.device(), torch.float32), markup=False)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, work in (QUICK if options.quick else WORK).items():
        seen = measure(pair, name, work, 1 if options.quick else options.repeats, console)
        found[name] = {setting: one.figures() for setting, one in seen.items()}
        console.print(markdown(name, found[name]) if options.markdown else table(name, found[name]), markup=False)
    keep_figures(options, found)
    platform.shut_down()


def measure(pair: Pair, name: str, work: Work, repeats: int, console: Console) -> dict[str, Seen]:
    """Every setting, in turns."""
    seen = {setting.name: Seen() for setting in SETTINGS}
    engines = {setting.name: engine_of(pair, setting, work) for setting in SETTINGS}
    for repeat in range(repeats + 1):
        for setting, engine in engines.items():
            warming = Seen()
            serve(engine, work, f"{name} {repeat}", seen[setting] if repeat else warming)  # the first warms up
        console.print(f"  {name}: {repeat}/{repeats}", markup=False)
    return seen


def engine_of(pair: Pair, setting: Setting, work: Work) -> InferenceEngine:
    """An engine of this setting, which knows the prefix."""
    with enough(setting.enough):
        engine = pair.engine(
            CacheConfig(snapshot_slots=64), block_count=1_600, max_requests=64, max_prefills_per_step=setting.most
        )
    if work.shared:
        for turn in range(2):  # the second leaves the states where prompts part
            engine.generate(work.prompts(f"prefix {turn}")[:1], RequestParams(1))
    return engine


@contextlib.contextmanager
def enough(tokens: int | None) -> Iterator[None]:
    """Another default."""
    known = batching.ENOUGH_PREFILL_TOKENS
    with mock.patch.dict(known, dict.fromkeys(known, tokens) if tokens is not None else {}):
        yield


def serve(engine: InferenceEngine, work: Work, name: str, seen: Seen) -> None:
    """All requests to their end, so many in flight."""
    source = random.Random(name)
    waiting = [(prompt, source.choice(GENERATED)) for prompt in work.prompts(name)]
    live: dict[int, list[float]] = {}  # times of submission and of tokens
    first_id, begin = int(time.monotonic_ns()), time.perf_counter()
    while waiting or live:
        while waiting and len(live) < work.at_once:
            name_of = first_id + len(waiting)
            live[name_of] = [time.perf_counter()]
            prompt, generated = waiting.pop()
            engine.add_request(name_of, prompt, RequestParams(generated, ignore_eos=True))
        ended = {one.request_id: one for one in engine.step_modern()["finished_request_records"]}
        now = time.perf_counter()
        for request_id in list(live):
            if request_id in ended or engine.get_request(request_id).generated_count >= len(live[request_id]):
                live[request_id].append(now)
            if request_id in ended:
                note(seen, live.pop(request_id))
    seen.seconds += time.perf_counter() - begin


def note(seen: Seen, times: list[float]) -> None:
    """Note the end of one request."""
    submitted, *tokens = times
    seen.ttft.append(tokens[0] - submitted)
    seen.gaps.append(max(later - earlier for earlier, later in pairwise(tokens)))
    seen.tokens += len(tokens)


COLUMNS = ("mean ttft", "p99 ttft", "median of longest gaps", "longest gap", "tokens/s")


def table(name: str, found: Mapping[str, Mapping[str, float]]) -> Table:
    """Milliseconds, and tokens a second."""
    made = Table("prefills in a step", *COLUMNS, title=name)
    for setting, figures in found.items():
        made.add_row(setting, *(f"{figures[column]:.0f}" for column in COLUMNS))
    return made


def markdown(name: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """Format the figures as a Markdown table."""
    rows = [[name, *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    rows += [[setting, *(f"{figures[column]:.0f}" for column in COLUMNS)] for setting, figures in found.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
