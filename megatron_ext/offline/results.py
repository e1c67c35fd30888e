"""JSON results of a run. Their keys are an interface: scripts and golden values rely on them."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

import megatron_ext
from megatron_ext.config import RunConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.offline.passes import Pass
from megatron_ext.offline.prompt_texts import PromptText, submitted_text
from megatron_ext.scheduling.record import RequestRecord

_THROUGHPUT = "throughput"


def written(one: Pass, every: int) -> Iterator[tuple[int, RequestRecord]]:
    """Yield each `every`th request of a pass and the last one, with its index in the pass."""
    last = len(one.records) - 1
    return ((index, record) for index, record in enumerate(one.records) if index % every == 0 or index == last)


def selected(results: Mapping[str, object], run: RunConfig) -> dict[str, object]:
    """Return the keys of the file that are written."""
    if run.throughput_check_only:
        return {_THROUGHPUT: results[_THROUGHPUT]}
    return {key: value for key, value in results.items() if run.record_throughput or key != _THROUGHPUT}


# Top-level keys that are not requests. A checker takes every other key for a request id.
SYSTEM_KEYS = (
    "throughput",
    "mem-max-allocated-bytes",
    "lifetime_prefill_token_count",
    "lifetime_skipped_token_count",
    "model",
    "version",
    "prefix_cache",
    "prefix_cache_lost",
    "speculation",
    "geometry",
)

_UNFOLDED = 2  # levels of objects with a line for each field: the whole, and each request


def build_results(
    engine: InferenceEngine,
    passes: Sequence[Pass],
    *,
    model: str,
    with_events: bool,
    prompt_text: PromptText = submitted_text,
    every: int = 1,
) -> dict[str, object]:
    """Return the contents of `--output-path`.

    Args:
        engine: Engine that ran the passes.
        passes: All passes in order.
        model: Name of the model.
        with_events: Whether requests have the key `events`.
        prompt_text: Text of `input_prompt`.
        every: See `written`.
    """
    statistics = engine.statistics()
    speculation = statistics.speculation
    system = {
        "throughput": [one.throughput for one in passes],
        "mem-max-allocated-bytes": peak_memory(),
        "lifetime_prefill_token_count": engine.lifetime_prefill_token_count,
        "lifetime_skipped_token_count": engine.lifetime_skipped_token_count,
        "model": model,
        "version": megatron_ext.__version__,
        "prefix_cache": engine.prefix_cache_statistics(),
        "prefix_cache_lost": statistics.prefix_cache_lost(),
        "speculation": None if speculation is None else speculation.shown(),
        "geometry": engine.geometry.shown(),
    }
    assert tuple(system) == SYSTEM_KEYS, "a top-level key is missing from SYSTEM_KEYS"
    records = [record for one in passes for _, record in written(one, every)]
    has_drafts = speculation is not None
    requests = {
        str(record.request_id): request_results(record, with_events, prompt_text, with_drafts=has_drafts)
        for record in records
    }
    return requests | system


def request_results(
    record: RequestRecord, with_events: bool, prompt_text: PromptText = submitted_text, *, with_drafts: bool = False
) -> dict[str, object]:
    """Return the object of one request. Log-prob keys exist if log-probs were requested, null where not computed.

    Args:
        record: Record of the request.
        with_events: Whether its events are included.
        prompt_text: Text of `input_prompt`.
        with_drafts: Whether drafts are counted, i.e. speculation is on.
    """
    entry: dict[str, object] = {
        "input_prompt": prompt_text(record),
        "generated_text": record.generated_text,
        "generated_tokens": list(record.generated_tokens),
        "latency": record.latency,
        "ttft": record.ttft,
        "step_count": record.step_count,
        "status": record.status.name,
        "error": record.error,
        "finish_reason": record.finish_reason,
        "prompt_token_count": record.prompt_token_count,
        "matched_block_count": record.matched_block_count,
        "skipped_prefill_token_count": record.skipped_prefill_token_count,
        "computed_prefill_token_count": record.computed_prefill_token_count,
        "recomputed_token_count": record.recomputed_token_count,
        "prefill_reasons": record.prefill_reasons,
    }
    if with_drafts:
        entry |= {
            "draft_token_count": record.draft_token_count,
            "accepted_token_count": record.accepted_token_count,
        }
    if record.prefix_cache_explanation is not None:
        entry["prefix_cache_explanation"] = record.prefix_cache_explanation.to_dict()
    if record.generated_log_probs is not None:
        entry |= _log_probs(record)
    if with_events:
        entry["events"] = [event.to_dict() for event in record.events]
    return entry


def _log_probs(record: RequestRecord) -> dict[str, object]:
    prompt, generated = record.prompt_log_probs, record.generated_log_probs or ()
    return {
        "prompt_logprobs": None if prompt is None else list(prompt),
        "generated_logprobs": list(generated),
        "logprobs": [*(prompt or ()), *generated],
        "top_n_logprobs": _top_n(record.generated_top_n_log_probs),
        "prompt_top_n_logprobs": _top_n(record.prompt_top_n_log_probs),
    }


def _top_n(positions: Sequence[dict[int, float]] | None) -> list[dict[str, float]] | None:
    if positions is None:
        return None
    return [{str(token): log_prob for token, log_prob in position.items()} for position in positions]


def peak_memory() -> int:
    """Return the peak memory in bytes: of tensors on CUDA; of the whole process on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def to_json(results: dict[str, object]) -> str:
    """Return reviewable JSON: a line for each field and for each event, a list of numbers on one line."""
    return _to_json(results, depth=0) + "\n"


def _to_json(value: object, depth: int) -> str:
    if isinstance(value, dict) and value and depth < _UNFOLDED:
        items = [f"{json.dumps(key)}: {_to_json(item, depth + 1)}" for key, item in value.items()]
        opening, closing = "{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = [json.dumps(item, ensure_ascii=False) for item in value]
        opening, closing = "[]"
    else:
        return json.dumps(value, ensure_ascii=False)
    indent = "\n" + " " * depth
    return opening + indent + " " + f",{indent} ".join(items) + indent + closing
