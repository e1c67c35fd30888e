"""Identical runs of requests on one rank and on several: observations of rank 0 and actions of the others.

whole = whole_parameters(build_slow_decay(CONFIG))
alone = live(None, CONFIG, whole, SCRIPT)
first, second = run_ranks(live, 2, ParallelConfig(tensor_model_parallel_size=2), CONFIG, whole, SCRIPT)
assert_same(first, alone)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, ParallelConfig, RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine, build_worker
from megatron_ext.mcore.parallel_state.process_groups import make_parallel_context
from megatron_ext.memory.budget import KVCacheConfig
from megatron_ext.models.build import build_model
from megatron_ext.parallel.worker import Worker
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.record import RequestRecord
from tests.unit_tests.support.multi_token import drafting
from tests.unit_tests.support.spread import Whole, fill
from tests.unit_tests.support.tokenizers import PieceTokenizer

CPU = torch.device("cpu")
MAX_STEPS = 2000


@dataclass(frozen=True)
class Script:
    """Script of actions for an engine, in order.

    Attributes:
        actions: ("add", id, tokens, fields of `RequestParams`), ("steps", count), ("abort", id), ("reset",),
            ("weights",), ("suspend",). Remaining requests are served to the end.
        batching: Fields of `BatchingConfig`.
        cache: Fields of `CacheConfig`.
        mtp: Drafts of the model's own layer of multi-token prediction.
        speculation: Further fields of `SpeculationConfig` with `mtp`.
        takes_turns: Whether request i goes to replica i modulo their number, whatever the policy says.
        packs_weights: Whether weights are packed.
    """

    actions: Sequence[tuple]
    batching: Mapping[str, object] = field(default_factory=dict)
    cache: CacheConfig = field(default_factory=CacheConfig)
    mtp: int = 0
    speculation: Mapping[str, object] = field(default_factory=dict)
    takes_turns: bool = False
    packs_weights: bool = False


@dataclass(frozen=True)
class Lived:
    """Observations of a rank.

    Attributes:
        records: Records by request, on rank 0.
        statistics: The `prefix_cache` object, on rank 0.
        counters: Counters of its scheduler; on rank 0 of all replicas.
        steps: Number of steps with computed tokens.
        geometry: KV cache sizes of all ranks.
    """

    records: dict[int, RequestRecord]
    statistics: dict[str, int] | None
    counters: Counters
    steps: int
    geometry: KVCacheConfig


def live(parallel: ParallelConfig | None, config: ModelConfig, whole: Whole, script: Script) -> Lived:
    """Run a life on one rank of a world; None for `parallel` is a single rank."""
    platform.initialize(parallel)
    model = build_model(config, device=CPU, parallel=parallel)
    fill(model, whole)
    parallel_context = make_parallel_context(parallel or ParallelConfig())
    settings = (
        model,
        config,
        PieceTokenizer(config.vocab_size),
        BatchingConfig(**({"block_size": 16, "block_count": 40, "max_requests": 4} | dict(script.batching))),
        script.cache,
    )
    shared = {"dtype": torch.float32, "parallel_context": parallel_context, "packs_weights": script.packs_weights}
    if script.mtp:
        shared["speculation"] = drafting(script.mtp, **script.speculation)
    if parallel_context is None or parallel_context.is_driver:
        return lead(build_engine(*settings, **shared), script)
    return _follow(build_worker(*settings, **shared))


def _follow(follower: Worker) -> Lived:
    follower.follow()
    follower.scheduler.check()
    geometry = follower._resources._context.plan.world
    return Lived({}, None, follower.scheduler.counters, follower.step_count, geometry)


def lead(engine: InferenceEngine, script: Script) -> Lived:
    """A whole life on rank 0, or on the only rank."""
    records: dict[int, RequestRecord] = {}
    turns = itertools.count()
    for name, *arguments in script.actions:
        _act(engine, name, arguments, records, turns if script.takes_turns else None)
    for _ in range(MAX_STEPS):
        if not engine.has_unfinished_requests():
            break
        _step(engine, records)
    assert not engine.has_unfinished_requests(), "requests never end"
    engine.close()
    counters, world = dataclasses.replace(engine.core.counters), engine.plan.world
    return Lived(records, engine.core.statistics().prefix_cache(), counters, engine.step_count, world)


def _act(
    engine: InferenceEngine,
    name: str,
    arguments: Sequence,
    records: dict[int, RequestRecord],
    turns: Iterator[int] | None,
) -> None:
    if name == "add":
        request_id, tokens, params = arguments
        engine.add_request(
            request_id, tokens, RequestParams(**params), replica_index=None if turns is None else next(turns)
        )
    elif name == "steps":
        for _ in range(arguments[0]):
            if engine.has_unfinished_requests():
                _step(engine, records)
    elif name == "abort":
        if arguments[0] not in records:
            engine.abort_request(*arguments)
    elif name == "reset":
        engine.reset_prefix_cache()
    elif name == "weights":
        engine.weights_changed()
    else:
        assert name == "suspend", name
        engine.suspend()
        engine.resume()


def _step(engine: InferenceEngine, records: dict[int, RequestRecord]) -> None:
    for record in engine.step_modern()["finished_request_records"]:
        records[record.request_id] = record
    engine.check()


# How a record came to be, which no two runs have in common.
TIMES = ("events", "arrival_wall_time", "latency", "ttft")
SCORES = ("prompt_log_probs", "generated_log_probs", "prompt_top_n_log_probs", "generated_top_n_log_probs")


def assert_same(one: Lived, other: Lived, *, atol: float = 1e-4) -> None:
    """Equal tokens, counts, reasons and statistics; log-probs within `atol`."""
    assert one.records.keys() == other.records.keys()
    for name, record in one.records.items():
        assert_same_record(record, other.records[name], atol)
    assert one.statistics == other.statistics
    assert one.counters == other.counters
    assert one.steps == other.steps


def assert_same_record(one: RequestRecord, other: RequestRecord, atol: float = 1e-4) -> None:
    """Check that two records of one request are equal, scores within `atol`."""
    left, right = dataclasses.asdict(one), dataclasses.asdict(other)
    for name in left.keys() - set(TIMES) - set(SCORES):
        assert left[name] == right[name], f"request {one.request_id}: {name}"
    for name in SCORES:
        assert_close(left[name], right[name], atol, f"request {one.request_id}: {name}")


def assert_close(one: object, other: object, atol: float, what: str) -> None:
    if isinstance(one, dict):
        assert isinstance(other, dict), what
        one, other = list(one.values()), list(other.values())  # whose tokens may swap where they are close
    if isinstance(one, list | tuple):
        assert len(one) == len(other), what
        for left, right in zip(one, other, strict=True):
            assert_close(left, right, atol, what)
    elif one is None:
        assert other is None, what
    else:
        assert abs(one - other) <= atol, f"{what}: {one}, {other}"
