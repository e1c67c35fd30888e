"""Prefix caching of a hybrid: first requests with a prefix, snapshot modes, unique prompts, prefills in a step."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

from benchmarks.cases import Figure, Run, case, token_ids
from benchmarks.measuring import medians, percentile
from benchmarks.models import OFF, Engine, engine, pair, prompts
from benchmarks.peers.ours import Ours
from benchmarks.peers.work import Timed, serve
from megatron_ext.config import CacheConfig, RequestParams, batching
from megatron_ext.models.load import LoadedModel
from megatron_ext.scheduling.record import RequestRecord

OWN, BLOCK, SLOTS = 128, 64, 64  # OWN: tokens of each prompt that are not shared
ON = CacheConfig(snapshot_slots=SLOTS)
ON_REQUEST = CacheConfig(snapshot_slots=SLOTS, provisional_slots=0)  # without opportunistic snapshots
ALIGN = CacheConfig(snapshot_slots=SLOTS, snapshot_mode="align")
STEP_TOKENS = 2048  # of a step in which modes are compared, so that both cut prompts
ONE = RequestParams(1)
_names = itertools.count()


def roomy(loaded: LoadedModel, cache: CacheConfig, max_tokens: int = 80_000) -> Engine:
    """Build an engine with room for every prompt of a measurement, by default in one step."""
    return engine(loaded, cache, block_count=1600, block_size=BLOCK, max_requests=16, max_tokens=max_tokens)


def fresh(count: int) -> list[int]:
    """Return token ids that no other call returns."""
    return token_ids(count, f"fresh {next(_names)}")


def after(prefix: Sequence[int], count: int, own: int = OWN) -> list[list[int]]:
    """Return prompts with a common prefix and different continuations."""
    return [[*prefix, *fresh(own)] for _ in range(count)]


def slowest(records: Sequence[RequestRecord]) -> float:
    """Return the largest time to first token."""
    return max(record.ttft for record in records if record.ttft is not None)


@case("latency", in_bench=True, quick={"shared": (256,), "own": 128})
def second_request(run: Run, shared: tuple = (2048, 8192), own: int = 512, slots: tuple = (40, 64)) -> None:
    """Skipped tokens and time of the first, second and third request with a new prefix."""
    loaded = pair().ours
    for prefix, free in zip(shared, slots, strict=False):
        built, found = roomy(loaded, CacheConfig(snapshot_slots=free)), {}
        for name, prompt in zip(("first", "second", "third"), after(fresh(prefix), 3, own), strict=True):
            (record,) = built.generate([prompt], ONE)
            found |= {f"{name} skips": record.skipped_prefill_token_count, f"{name} ttft, s": record.ttft}
        run.row(f"{prefix:,} shared, {own} own", found)


@case("latency", quick={"repeats": 1, "shared": (256,), "at_once": (1, 2)})
def snapshot_modes(run: Run, repeats: int = 3, shared: tuple = (2048, 8192), at_once: tuple = (1, 8)) -> None:
    """First token with snapshot mode align beside kernel, cold and warm, in steps of 2,048 tokens."""
    loaded = pair().ours
    for count, prefix in itertools.product(at_once, shared):
        runs = [[_in_mode(loaded, mode, prefix, count) for mode in (ON, ALIGN)] for _ in range(repeats)]
        found: dict[str, Figure] = {}
        for place, kind in enumerate(("cold", "warm")):
            kernel, align = (statistics.median(one[mode][place] for one in runs) for mode in (0, 1))
            found |= {f"kernel {kind}, s": kernel, f"align / kernel, {kind}": align / kernel}
        run.row(f"{prefix:,} shared, {count} at once", found)


def _in_mode(loaded: LoadedModel, cache: CacheConfig, shared: int, count: int) -> tuple[float, float]:
    built, prefix = roomy(loaded, cache, STEP_TOKENS), fresh(shared)
    first = slowest(built.generate(after([], count, shared + OWN), ONE))
    for prompt in after(prefix, 2):
        built.generate([prompt], ONE)
    return first, slowest(built.generate(after(prefix, count), ONE))


@case("latency", in_bench=True, quick={"repeats": 1, "lengths": (600,), "counts": (2,)})
def unique_prompts(
    run: Run, repeats: int = 5, lengths: tuple = (2176, 512, 2048, 8192), counts: tuple = (8, 8, 4, 1)
) -> None:
    """Prompts with nothing in common: cache on beside off, opportunistic snapshots beside those on request."""
    loaded = pair().ours
    for length, count in zip(lengths, counts, strict=True):
        engines = {cache: roomy(loaded, cache) for cache in (ON, ON_REQUEST, OFF)}
        works = {
            cache: lambda built=built, n=count, p=length: built.generate(after([], n, p), ONE)
            for cache, built in engines.items()
        }
        times = medians(works, repeats)
        found = {"cache on / off": times[OFF] / times[ON], "opportunistic / on request": times[ON_REQUEST] / times[ON]}
        on, on_request = (_opportunistic(engines[cache]) for cache in (ON, ON_REQUEST))
        is_right = on > 0 == on_request
        run.row(f"{count} of {length:,}", {**found, "snapshots as expected": is_right})


def _opportunistic(built: Engine) -> int:
    """Return how many opportunistic snapshots were taken."""
    found = built.core.statistics().prefix_cache()
    return 0 if found is None else found["provisional_taken"]


# Limits on prefills in a step

ANSWERS, AT_ONCE = range(16, 49), 8  # tokens of an answer, so that the ends of requests drift apart; requests in flight
# Tokens with which a step begins no other prefill, and requests that prefill in a step.
LIMITS: dict[str, tuple[int | None, int | None]] = {
    "all at once (0)": (None, 0),
    **{str(most): (None, most) for most in (1, 2, 4)},
    **{f"enough with {tokens} tokens": (tokens, None) for tokens in (16, 64, 256)},
}


@dataclass(frozen=True)
class Load:
    """Requests of equal length.

    Attributes:
        requests: Number of requests.
        shared: Tokens that all begin with; cached before anything is timed.
        own: Tokens of each request's own.
        at_once: Requests in flight.
    """

    requests: int
    shared: int
    own: int
    at_once: int

    def prompts(self, name: str) -> list[list[int]]:
        """Return prompts that no other name has, after the shared prefix."""
        prefix = token_ids(self.shared, f"prefix {self.shared}")
        return [prefix + one for one in prompts(self.requests, self.own, name)]


LOADS = {
    "128 after 2,048 cached": Load(48, 2_048, 128, AT_ONCE),
    "600, nothing in common": Load(32, 0, 600, AT_ONCE),
    "64 short ones of 10 at once": Load(64, 0, 10, 64),
}
QUICK_LOADS = {"64 after 128 cached": Load(4, 128, 64, AT_ONCE)}


@case("latency", quick={"repeats": 1})
def prefills_per_step(run: Run, repeats: int = 3) -> None:
    """First tokens, gaps and throughput for each limit on prefills in a step, in turns."""
    loaded = pair().ours
    for name, load in (QUICK_LOADS if run.is_quick else LOADS).items():
        peers = {limit: _limited(loaded, limit, load) for limit in LIMITS}
        seen: dict[str, list[tuple[list[Timed], float]]] = {limit: [] for limit in LIMITS}
        for repeat in range(repeats + 1):
            source = random.Random(repeat)
            counts = [source.choice(ANSWERS) for _ in range(load.requests)]
            for limit, peer in peers.items():
                seen[limit].append(serve(peer, load.prompts(f"{name} {repeat}"), load.at_once, counts))
        for limit, runs in seen.items():
            run.row(f"{name}: {limit}", _figures(runs[1:]))  # the first warms up


def _limited(loaded: LoadedModel, limit: str, load: Load) -> Ours:
    """Build an engine with this limit, which has cached the prefix."""
    enough, most = LIMITS[limit]
    known = batching.ENOUGH_PREFILL_TOKENS
    with mock.patch.dict(known, dict.fromkeys(known, enough) if enough is not None else {}):
        peer = Ours(loaded, max_requests=64, max_prefills_per_step=most)
    if load.shared:
        for turn in range(2):  # the second leaves a snapshot at the divergence
            serve(peer, load.prompts(f"prefix {turn}")[:1], 1, 1)
    return peer


@case("latency", quick={"repeats": 1, "requests": 8, "shared": 128, "cold": 128})
def schedule_policies(
    run: Run, repeats: int = 3, requests: int = 64, shared: int = 2_048, cold: int = 2_048, budget: int = 65_536
) -> None:
    """First tokens of 16 clients, of which every second prompt is cached but for its last 64 tokens, by policy."""
    loaded, warm = pair().ours, token_ids(shared, f"prefix {shared}")
    peers = {
        policy: Ours(loaded, max_requests=4, schedule_policy=policy, schedule_overtake_tokens=budget)
        for policy in ("fcfs", "lpm")
    }
    seen: dict[str, list[Timed]] = {policy: [] for policy in peers}
    seconds = dict.fromkeys(peers, 0.0)
    for repeat in range(repeats + 1):
        name = f"policies {repeat}"
        mixed = zip(prompts(requests // 2, cold, name), prompts(requests // 2, 64, f"{name} warm"), strict=True)
        sent = [prompt for one, own in mixed for prompt in (one, [*warm, *own])]
        for policy, peer in peers.items():
            for _ in range(2 if repeat == 0 else 1):  # the second leaves a snapshot at the divergence
                serve(peer, [[*warm, *fresh(64)]], 1, 1)
            records, duration = serve(peer, sent, 16, 32)
            seen[policy] += records if repeat else []  # the first warms up
            seconds[policy] += duration if repeat else 0.0
    for policy, records in seen.items():
        for kind, some in (("all", records), ("cold", records[::2]), ("warm", records[1::2])):
            ttft = sorted(1e3 * record.first for record in some)
            columns = {f"p{percent} ttft, ms": percentile(ttft, percent) for percent in (50, 95, 99)}
            run.row(f"{policy}: {kind}", columns)
        cached = sum(record.cached for record in records) / max(1, sum(record.prompt for record in records))
        tokens = sum(len(record.tokens) for record in records)
        run.row(f"{policy}: all", {"skipped share": cached, "tokens/s": tokens / seconds[policy]})


def _figures(runs: list[tuple[list[Timed], float]]) -> dict[str, Figure]:
    """Return the columns of a row; times are milliseconds."""
    records = [record for one, _ in runs for record in one]
    ttft = sorted(1e3 * record.first for record in records)
    gaps = [1e3 * max(later - earlier for earlier, later in itertools.pairwise(record.arrivals)) for record in records]
    return {
        "mean ttft, ms": statistics.mean(ttft),
        "p99 ttft, ms": percentile(ttft, 99),
        "median of longest gaps, ms": statistics.median(gaps),
        "longest gap, ms": max(gaps),
        "tokens/s": sum(len(record.tokens) for record in records) / sum(seconds for _, seconds in runs),
    }
