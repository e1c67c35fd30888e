"""Time to the first token with and without a cached prefix, in a hybrid model; costs where nothing repeats.

A deep copy of a prefix's cache is the best that a script around transformers can do: it is told where the prefix ends.
The floor is the time of the matrix products that cannot be skipped, at the rate measured in the run.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from benchmarks.cases import Figure, Run, case, token_ids
from benchmarks.measuring import matmul_rate, medians, synchronize
from benchmarks.models import OFF, Engine, Pair, engine, forward_flops, pair, prompts
from megatron_ext.config import CacheConfig, RequestParams, batching
from megatron_ext.mcore import platform
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


def cold(loaded: LoadedModel, shared: int, count: int) -> float:
    """Return the seconds to the last first token of prompts that nothing is cached of."""
    return slowest(roomy(loaded, OFF).generate(after(fresh(shared), count), ONE))


def warm(loaded: LoadedModel, shared: int, count: int) -> float:
    """Return the seconds of the same requests after the prefix was seen twice."""
    built, prefix = roomy(loaded, ON), fresh(shared)
    for prompt in after(prefix, 2):
        built.generate([prompt], ONE)
    records = built.generate(after(prefix, count), ONE)
    if any(record.skipped_prefill_token_count != shared for record in records):
        raise RuntimeError("a prompt did not skip its prefix: the figures would mean something else")
    return slowest(records)


@torch.inference_mode()
def copied(reference: torch.nn.Module, shared: int, count: int) -> float:
    """Return the seconds that transformers takes to copy the cache of the prefix and compute the rest."""
    device = platform.device()
    prefix, own = torch.tensor([fresh(shared)], device=device), torch.tensor(after([], count), device=device)
    kept = reference(prefix, use_cache=True, logits_to_keep=1).past_key_values
    synchronize()
    start = time.perf_counter()
    cache = copy.deepcopy(kept)
    if count > 1:
        _repeat_cache(cache, count)
    reference(own, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
    return time.perf_counter() - start


def _repeat_cache(cache: DynamicCache, count: int) -> None:
    """Repeat a cache of one sequence; transformers' own method knows attention layers only."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for states in (layer.conv_states, layer.recurrent_states):
                states.update({i: one.repeat_interleave(count, 0) for i, one in states.items() if one is not None})
        elif layer.is_initialized:
            layer.batch_repeat_interleave(count)


@case("latency", quick={"repeats": 1, "shared": (256,), "at_once": (1, 2)})
def shared_prefix(run: Run, repeats: int = 3, shared: tuple = (2048, 8192), at_once: tuple = (1, 8)) -> None:
    """First token after a shared prefix, cold and warm, beside transformers with a copied cache and the floor."""
    both = pair()
    rate = matmul_rate(torch.float32, platform.device())
    run.remark(f"matrix products: {rate / 1e9:.0f} GFLOP/s")
    warm(both.ours, BLOCK, 1)
    for count, prefix in itertools.product(at_once, shared):
        times = [
            (cold(both.ours, prefix, count), warm(both.ours, prefix, count), copied(both.reference, prefix, count))
            for _ in range(repeats)
        ]
        first, later, script = (statistics.median(one) for one in zip(*times, strict=True))
        floors = [forward_flops(both.ours, [prefix + OWN] * count, skipped) / rate for skipped in (0, prefix)]
        run.row(
            f"{prefix:,} shared, {count} at once",
            {
                **{"cold, s": first, "warm, s": later, "copied cache, s": script, "cold / floor": first / floors[0]},
                **{"warm / floor": later / floors[1], "warm / copied": later / script},
            },
        )


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


@dataclass
class Times:
    """Seconds of all requests with one limit."""

    ttft: list[float] = field(default_factory=list)
    longest_gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, Figure]:
        """Return the columns of a row."""
        ordered = sorted(self.ttft)
        return {
            "mean ttft, ms": 1e3 * statistics.mean(ordered),
            "p99 ttft, ms": 1e3 * ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))],
            "median of longest gaps, ms": 1e3 * statistics.median(self.longest_gaps),
            "longest gap, ms": 1e3 * max(self.longest_gaps),
            "tokens/s": self.tokens / self.seconds,
        }


@case("latency", quick={"repeats": 1})
def prefills_per_step(run: Run, repeats: int = 3) -> None:
    """First tokens, gaps and throughput for each limit on prefills in a step, in turns."""
    both = pair()
    for name, load in (QUICK_LOADS if run.is_quick else LOADS).items():
        engines = {limit: _limited(both, limit, load) for limit in LIMITS}
        seen = {limit: Times() for limit in LIMITS}
        for repeat in range(repeats + 1):
            for limit, built in engines.items():
                _serve(built, load, f"{name} {repeat}", seen[limit] if repeat else Times())
        for limit, times in seen.items():
            run.row(f"{name}: {limit}", times.figures())


def _limited(both: Pair, limit: str, load: Load) -> Engine:
    """Build an engine with this limit, which has cached the prefix."""
    enough, most = LIMITS[limit]
    with _enough_prefill_tokens(enough):
        built = engine(both.ours, ON, block_count=1_600, max_requests=64, max_prefills_per_step=most)
    if load.shared:
        for turn in range(2):  # the second leaves a snapshot at the divergence
            built.generate(load.prompts(f"prefix {turn}")[:1], ONE)
    return built


@contextlib.contextmanager
def _enough_prefill_tokens(tokens: int | None) -> Iterator[None]:
    known = batching.ENOUGH_PREFILL_TOKENS
    with mock.patch.dict(known, dict.fromkeys(known, tokens) if tokens is not None else {}):
        yield


def _serve(built: Engine, load: Load, name: str, times: Times) -> None:
    """Serve all requests, `at_once` of them in flight."""
    source = random.Random(name)
    waiting = [(prompt, source.choice(ANSWERS)) for prompt in load.prompts(name)]
    live: dict[int, list[float]] = {}  # times of submission and of tokens
    begin = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < load.at_once:
            prompt, generated = waiting.pop()
            submitted = time.perf_counter()
            live[built.add(prompt, RequestParams(generated, ignore_eos=True)).request_id] = [submitted]
        output, now = built.step(), time.perf_counter()
        counts = {request.request_id: request.generated_count for request in output.active}
        counts |= {record.request_id: len(record.generated_tokens) for record in output.records}
        for request_id, moments in live.items():
            if counts.get(request_id, 0) >= len(moments):
                moments.append(now)
        for record in output.records:
            submitted, *tokens = live.pop(record.request_id)
            times.ttft.append(tokens[0] - submitted)
            times.longest_gaps.append(max(later - earlier for earlier, later in itertools.pairwise(tokens)))
            times.tokens += len(tokens)
    times.seconds += time.perf_counter() - begin
