"""Costs of the cache on disk: writing without hits, loads beside decodes, and audits."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cases import Run, case, token_ids
from benchmarks.latency.restart import MIB, MODELS, started
from benchmarks.models import Engine
from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams
from megatron_ext.engine.cache_audit import AuditCounts
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.warm_restart_setup import open_disk_cache
from megatron_ext.models.identity import cache_facts, weights_digest
from megatron_ext.models.load import LoadedModel
from megatron_ext.prefix_cache.disk.tier import DiskTier
from megatron_ext.scheduling.request_inputs import RequestInputs

BATCH = 4  # requests at a time
SETTLE_SECONDS = 20.0  # maximum wait for evicted entries to be written
ANSWER = RequestParams(4, ignore_eos=True)


def built(loaded: LoadedModel, cache: CacheConfig, **batching: object) -> InferenceEngine:
    """Build an engine around a model, as the other one of a comparison is built."""
    settings = BatchingConfig(max_requests=BATCH, **batching)
    return build_engine(loaded.model, loaded.config, loaded.tokenizer, settings, cache, dtype=loaded.dtype)


def texts(loaded: LoadedModel, lengths: Sequence[int], name: str) -> list[list[int]]:
    """Return prompts with nothing in common."""
    limit = min(4096, loaded.config.vocab_size or 0) - 1
    return [[one % limit + 1 for one in token_ids(length, f"{name} {i}")] for i, length in enumerate(lengths)]


class Costs:
    """Seconds of the turns of one engine: CPU time of the process and of this thread, and wall time."""

    def __init__(self) -> None:
        self.turns: list[tuple[float, float, float]] = []

    def measure(self, work: Callable[[], object], after: Callable[[], object] = lambda: None) -> None:
        """Measure one turn; CPU time of the process counts until `after` returns."""
        process, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
        work()
        thread, wall = time.thread_time() - thread, time.perf_counter() - wall
        after()
        self.turns.append((time.process_time() - process, thread, wall))

    def over(self, other: Costs) -> dict[str, float]:
        """Return the median ratios to the turns of another engine that took turns with this one."""
        names = ("CPU, ratio", "CPU of the engine's thread, ratio", "wall, ratio")
        pairs = [list(zip(*both, strict=True)) for both in zip(self.turns, other.turns, strict=True)]
        ratios = [[mine / its for mine, its in pair] for pair in pairs]
        return {name: statistics.median(one[place] for one in ratios) for place, name in enumerate(names)}


def settle(engine: InferenceEngine) -> None:
    """Wait until evicted entries are written, if the engine has a directory, without CPU time."""
    disk, until = engine.core.disk, time.monotonic() + SETTLE_SECONDS
    while disk is not None and disk.counts()["written"] < disk.counts()["evicted"] and time.monotonic() < until:
        time.sleep(0.01)


@case("latency", quick={"rounds": 1, "length": 128, "sizes": ("5m",)})
def tier_without_hits(run: Run, rounds: int = 6, length: int = 320, sizes: tuple = ("5m", "250m")) -> None:
    """Requests of which none hits, with a disk tier that takes what memory evicts, and without one."""
    for size in sizes:
        loaded = MODELS[size]()
        weights, blocks = weights_digest(loaded.model), BATCH * (length // 64 + 3)
        memory = {"block_count": blocks, "block_size": 64}
        with tempfile.TemporaryDirectory() as folder:
            cache = CacheConfig(prefix_cache_dir=folder + "/cache", prefix_cache_disk_gb=4.0, snapshot_slots=2 * BATCH)
            tier = built(loaded, cache, **memory)
            open_disk_cache(tier, cache_facts(loaded, weights), cache)
            engines = {"memory": built(loaded, CacheConfig(snapshot_slots=2 * BATCH), **memory), "disk": tier}
            costs = {name: Costs() for name in engines}
            for number in range(rounds + 1):
                batch = texts(loaded, [length] * BATCH, f"{size} {number}")
                for name, engine in engines.items():
                    costs[name].measure(
                        lambda engine=engine, batch=batch: Engine(engine.core).generate(
                            batch, RequestParams(16, ignore_eos=True)
                        ),
                        lambda engine=engine: settle(engine),
                    )
                if not number:  # it warms up
                    for one in costs.values():
                        one.turns.clear()
            assert tier.core.disk is not None, "it has a directory"
            counts = tier.core.disk.counts()
            tier.core.disk.abandon()
        cpu, _, wall = (statistics.median(column) for column in zip(*costs["memory"].turns, strict=True))
        figures = {"CPU without, ms": 1e3 * cpu / BATCH, "wall without, ms": 1e3 * wall / BATCH}
        evicted, bytes_of = counts["evicted"], counts["bytes"]
        assert isinstance(bytes_of, int), "a count"
        written = {"evicted entries": evicted, "written, MiB": bytes_of / MIB, "drops": str(counts["drops"])}
        run.row(size, {**figures, **costs["disk"].over(costs["memory"]), **written})


class EndlessLoad:
    """Load of one run of a tier, which begins anew as soon as it has ended; nothing is placed."""

    def __init__(self, tier: DiskTier, hashes: Sequence[bytes], tokens: Sequence[int], block_size: int) -> None:
        self._tier, self._arguments = tier, (hashes, tokens, block_size)
        run = tier.find_run(hashes, 0, (len(tokens) - 1) // block_size)
        assert run is not None, "the prompt is on disk"
        self.run, self.ended = run, 0

    def go_on(self) -> None:
        """Begin the load, if none is under way."""
        self._tier.follow()
        for number in self._tier.complete():
            self._tier.give_up(number)
            self.ended += 1
        if not self._tier.loads:
            self._tier.begin(self.run, *self._arguments)

    def end(self) -> None:
        """Wait for the load that is under way."""
        while not self._tier.complete():
            self._tier.wait(1.0)
            self._tier.follow()
        self._tier.forget_loads()


@case("latency", quick={"rounds": 1, "length": 192, "sizes": ("5m",)})
def decode_beside_load(run: Run, rounds: int = 6, length: int = 1024, sizes: tuple = ("5m", "250m")) -> None:
    """Steps of 4 decoding requests while entries are read from disk without a pause, and without reads."""
    steps = 8
    for size in sizes:
        loaded = MODELS[size]()
        weights = weights_digest(loaded.model)
        (prompt, *others) = texts(loaded, [length, *[64] * 3], f"{size} beside")
        with tempfile.TemporaryDirectory() as folder:
            engine = started(loaded, weights, Path(folder) / "cache")
            Engine(engine.core).generate([prompt], RequestParams(1, ignore_eos=True))
            engine.close()
            engine = started(loaded, weights, Path(folder) / "cache")
            (replica,), disk = engine.core.replicas, engine.core.disk
            assert disk is not None, "it has a directory"
            assert disk.tier is not None, "one rank"
            replica.loading = None  # this case loads by itself
            driver = Engine(engine.core)
            requests = driver.start_decoding(
                [*others, others[0][::-1]], RequestParams(2 * steps * (rounds + 1) + 64, ignore_eos=True)
            )
            chain = driver.core.add(10**6, RequestInputs(tuple(prompt), RequestParams(1)))
            load = EndlessLoad(disk.tier, list(chain.block_hashes), prompt, engine.core.scheduler.limits.block_size)
            driver.core.output.abort(chain)
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for number in range(rounds + 1):
                for is_loading in (False, True):
                    for _ in range(steps):
                        if is_loading:
                            load.go_on()
                        thread, wall = time.thread_time(), time.perf_counter()
                        driver.step()
                        if number:
                            found[is_loading].append((time.thread_time() - thread, time.perf_counter() - wall))
                    if is_loading:
                        load.end()
            assert not any(request.is_ended for request in requests), "all of them decode to the end"
            disk.abandon()
        figures: dict[str, float] = {"run, MiB": load.run.size / MIB, "loads": load.ended}
        for place, clock in enumerate(("CPU of the engine's thread", "wall")):
            alone, beside = (statistics.median(one[place] for one in found[which]) for which in (False, True))
            figures |= {f"{clock}, ms": 1e3 * alone, f"{clock} beside, ratio": beside / alone}
        run.row(size, figures)


def conversations(count: int, limit: int) -> list[list[int]]:
    """Return prompts of conversations, each turn at once after the one before; the first texts are one of eight."""
    source, prompts = random.Random(1), list[list[int]]()
    while len(prompts) < count:
        said = token_ids(16 * 2 ** source.randrange(5), f"system {source.randrange(8)}", limit)
        for _ in range(1 + min(15, int(source.expovariate(1 / 4)))):
            said = said + token_ids(source.randint(4, 64), f"turn {len(prompts)}", limit)
            prompts.append(said)
    return prompts[:count]


@case("latency", quick={"requests": 24, "intervals": (4,)})
def audits(run: Run, requests: int = 1600, intervals: tuple = (1000, 100)) -> None:
    """Turns of conversations with audits of every n-th hit, and without, by the embedded model."""
    loaded = MODELS["5m"]()
    limit = (loaded.config.vocab_size or 0) - 1
    prompts = conversations(requests, limit)
    engines = {n: built(loaded, CacheConfig(audit_interval=n), buffer_size_gb=0.1) for n in (0, *intervals)}
    costs = {n: Costs() for n in engines}
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        for n, engine in engines.items():
            costs[n].measure(lambda engine=engine, batch=batch: Engine(engine.core).generate(batch, ANSWER))
    totals = {n: [sum(column) for column in zip(*one.turns, strict=True)] for n, one in costs.items()}
    for n, engine in engines.items():
        (replica,), counters = engine.core.replicas, engine.core.counters
        counts = AuditCounts() if replica.audit is None else replica.audit.counts
        cpu, _, wall = totals[n]
        run.row(
            f"{requests:,} requests, {f'every {n:,}th hit' if n else 'no audits'}",
            {
                "hits": counters.hits,
                "audits due": counts.due,
                "audits": counts.completed,
                "CPU, s": cpu,
                "CPU, ratio": cpu / totals[0][0],
                "wall, ratio": wall / totals[0][2],
                "share of audits, wall": counts.seconds / wall,
                "share of audits, tokens": counts.tokens / max(1, counters.prefill_tokens),
            },
        )
