"""JSON results of a run. Their keys are an interface: scripts and golden values rely on them.

The file of `--output-path` is what Megatron's checker of golden values takes: beside request ids it has Megatron's keys
alone. Counts of the run are in a second file, or with `--output-format full` all is in one.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

import megatron_ext
from megatron_ext.config import RunConfig
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.offline.passes import Pass
from megatron_ext.scheduling.record import LEAST_LOG_PROB, RequestRecord, TopN
from megatron_ext.text.detokenizer import excerpt

logger = logging.getLogger(__name__)

PromptText = Callable[[RequestRecord], str | None]
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


class PromptTexts:
    """Cache of prompt texts: the submitted text, or the decoded ids, decoded on first use, once for equal prompts."""

    def __init__(self, detokenize: Callable[[list[int]], str]) -> None:
        self._detokenize = detokenize
        self._texts: dict[tuple[int, ...], str | None] = {}

    def __call__(self, record: RequestRecord) -> str | None:
        """Return the text of a request's prompt; None, with a warning, if its tokenizer fails: results are kept."""
        if record.prompt_text is not None:
            return record.prompt_text
        tokens = record.prompt_tokens
        if tokens not in self._texts:
            try:
                self._texts[tokens] = self._detokenize(list(tokens))
            except Exception as error:
                logger.warning("the prompt of request %s has no text: %s", record.request_id, error)
                self._texts[tokens] = None
        return self._texts[tokens]


@dataclass(frozen=True)
class RequestEntries:
    """Builder of the entries.

    Attributes:
        prompt_text: Text of `input_prompt`.
        detokenize: Token ids, and `skip_special_tokens`, to text.
        with_events: Whether entries have the key `events`.
        with_drafts: Whether drafts are counted, i.e. speculation is on.
        with_disk: Whether cached entries may have been put back from disk.
        with_graphs: Whether steps may be captured; if not, `cuda_graph_request_count_map` is null, as in Megatron.
    """

    prompt_text: PromptText
    detokenize: Callable[..., str]
    with_events: bool = False
    with_drafts: bool = False
    with_disk: bool = False
    with_graphs: bool = False

    def entry(self, record: RequestRecord) -> dict[str, object]:
        """Return all of a request's entry but the counts of its pass.

        Log-prob keys exist if log-probs were requested; the best tokens are null without them. Times of events are
        seconds since the epoch.
        """
        entry: dict[str, object] = {
            "input_prompt": self.prompt_text(record),
            "generated_text": record.generated_text,
            "generated_tokens": list(record.generated_tokens),
            "latency": record.latency,
            "ttft": record.ttft,
            "top_n_logprobs": self._top_n(record.generated_top_n_log_probs),
            "prompt_top_n_logprobs": self._top_n(record.prompt_top_n_log_probs),
        }
        if record.generated_log_probs is not None:
            prompt, generated = list(record.prompt_log_probs or ()), list(record.generated_log_probs)
            entry |= {"prompt_logprobs": prompt, "generated_logprobs": generated, "logprobs": [*prompt, *generated]}
        if record.routing_indices is not None:
            entry["routing_indices"] = record.routing_indices.to_lists()
        entry |= {
            "status": record.status.name,
            "error": record.error,
            "finish_reason": record.finish_reason,
            "request_step_count": record.step_count,
            "prompt_token_count": record.prompt_token_count,
            "matched_block_count": record.matched_block_count,
            "skipped_prefill_token_count": record.skipped_prefill_token_count,
            "computed_prefill_token_count": record.computed_prefill_token_count,
            "recomputed_token_count": record.recomputed_token_count,
            "prefill_reasons": record.prefill_reasons,
        }
        if self.with_disk:
            entry["skipped_from_disk_token_count"] = record.skipped_from_disk_token_count
        if self.with_drafts:
            entry |= {
                "draft_token_count": record.draft_token_count,
                "accepted_token_count": record.accepted_token_count,
            }
        if (explanation := record.prefix_cache_explanation) is not None:
            around = excerpt(record.prompt_tokens, explanation.place, self.detokenize)
            entry["prefix_cache_explanation"] = explanation.to_dict(around)
        if self.with_events:
            offset = record.arrival_wall_time - record.events[0].timestamp
            entry["events"] = [event.to_dict() | {"timestamp": event.timestamp + offset} for event in record.events]
        return entry

    def counts(self, one: Pass) -> dict[str, object]:
        """Return the counts of a pass that each of its requests has: Megatron's `step_count` is the engine's."""
        captured = {str(rows): steps for rows, steps in sorted(one.steps.captured.items())}
        return {
            "step_count": one.steps.steps,
            "cuda_graph_request_count_map": captured if self.with_graphs else None,
        }

    def _top_n(self, positions: Sequence[TopN] | None) -> list[dict[str, float]] | None:
        """Return the best tokens by their texts; of tokens with equal text, the best one."""
        if positions is None:
            return None
        named: list[dict[str, float]] = []
        for position in positions:
            best: dict[str, float] = {}
            for token, log_prob in position.items():
                text = self.detokenize([token], skip_special_tokens=False)
                best[text] = max(log_prob, best.get(text, LEAST_LOG_PROB))
            named.append(best)
        return named


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
    """Return the counts of the run, over all passes."""
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
