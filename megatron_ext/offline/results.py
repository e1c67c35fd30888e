"""JSON results of a run. Their keys are an interface: scripts and golden values rely on them.

The file of `--output-path` is what Megatron's checker of golden values takes: beside request ids it has Megatron's keys
alone. Counts of the run are in a second file, or with `--output-format full` all is in one.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

import megatron_ext
from megatron_ext.config import RunConfig
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.offline.passes import Pass
from megatron_ext.offline.request_entries import RequestEntries
from megatron_ext.scheduling.record import RequestRecord

_THROUGHPUT = "throughput"

# Top-level keys that are not requests. Megatron's checker takes every other key for a request id.
MEGATRON_KEYS = (
    _THROUGHPUT,
    "mem-max-allocated-bytes",
    "lifetime_prefill_token_count",
    "async_sched_step_count",
    "async_sched_compaction_step_count",
)
# Keys of the counts of a run.
RUN_KEYS = (
    *MEGATRON_KEYS,
    "lifetime_skipped_token_count",
    "model",
    "version",
    "prefix_cache",
    "prefix_cache_lost",
    "speculation",
    "geometry",
    "prefix_cache_disk",  # with --prefix-cache-dir only
)


def megatron_results(passes: Sequence[Pass], entries: RequestEntries, every: int = 1) -> dict[str, object]:
    """Return the file of `--output-path` as Megatron's scripts write it: the last pass, ids from 0, its counts.

    Args:
        passes: All passes in order. After an interruption the last one that began counts.
        entries: Builder of the requests' entries.
        every: Number n; each nth request is in, and the last one.
    """
    last = next((one for one in reversed(passes) if one.seconds), passes[-1])
    prefilled = sum(one.computed_prefill_token_count + one.recomputed_token_count for one in last.records)
    counts = entries.counts(last)
    requests = {str(index): entries.entry(record) | counts for index, record in _selected(last, every)}
    return requests | _megatron_counts(passes, prefilled, last.steps)


def run_results(engine: LLMEngine, passes: Sequence[Pass], model: str) -> dict[str, object]:
    """Return the counts of the run, over all passes.

    Args:
        engine: Engine that ran the passes.
        passes: All passes in order.
        model: Name of the model.
    """
    statistics, steps = engine.counts()
    speculation = statistics.speculation
    counts = _megatron_counts(passes, steps.prefill_tokens, steps) | {
        "lifetime_skipped_token_count": statistics.counters.skipped_tokens,
        "model": model,
        "version": megatron_ext.__version__,
        "prefix_cache": statistics.prefix_cache(),
        "prefix_cache_lost": statistics.prefix_cache_lost(),
        "speculation": None if speculation is None else speculation.shown(),
        "geometry": engine.geometry.shown(),
    }
    disk = statistics.prefix_cache_disk()
    counts |= {} if disk is None else {"prefix_cache_disk": disk}
    assert tuple(counts) == RUN_KEYS[: len(counts)], "a key of the run is missing from RUN_KEYS"
    return counts


def full_results(
    run: Mapping[str, object], passes: Sequence[Pass], entries: RequestEntries, every: int = 1
) -> dict[str, object]:
    """Return everything in one object: the requests of all passes by their ids, and the counts of the run.

    Args:
        run: Counts of the run, from `run_results`.
        passes: All passes in order.
        entries: Builder of the requests' entries.
        every: See `megatron_results`.
    """
    requests = {
        str(record.request_id): entries.entry(record) | entries.counts(one)
        for one in passes
        for _, record in _selected(one, every)
    }
    return requests | dict(run)


def written(results: Mapping[str, object], run: RunConfig) -> dict[str, object]:
    """Return the results to write, with or without the throughput as its flags say."""
    if run.throughput_check_only:
        return {_THROUGHPUT: results[_THROUGHPUT]}
    return without_throughput(results, run)


def without_throughput(results: Mapping[str, object], run: RunConfig) -> dict[str, object]:
    """Return the results, without the throughput if it is not recorded."""
    return {key: value for key, value in results.items() if run.record_throughput or key != _THROUGHPUT}


def _megatron_counts(passes: Sequence[Pass], prefilled: int, steps: StepCounts) -> dict[str, object]:
    counts = [one.throughput for one in passes], peak_memory(), prefilled, steps.asynchronous, steps.discarding
    return dict(zip(MEGATRON_KEYS, counts, strict=True))


def _selected(one: Pass, every: int) -> Iterator[tuple[int, RequestRecord]]:
    """Yield each `every`th request of a pass and the last one, with its index in the pass."""
    last = len(one.records) - 1
    return ((index, record) for index, record in enumerate(one.records) if index % every == 0 or index == last)


def peak_memory() -> int:
    """Return the peak memory in bytes: of tensors on CUDA; of the whole process on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
