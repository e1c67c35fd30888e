"""JSON results in the form of Megatron-LM's `gpt_dynamic_inference.py`, for its checker of golden values.

The file has only that script's keys, and the last pass with ids from 0 and counts of that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.offline.passes import Pass
from megatron_ext.offline.prompt_texts import PromptText
from megatron_ext.offline.results import peak_memory, written
from megatron_ext.scheduling.record import RequestRecord, TopN
from megatron_ext.scheduling.request_events import Event, EventType

TokenText = Callable[[int], str]

_OURS_ALONE = (EventType.FIRST_TOKEN,)  # Megatron has an event for each token, or for none


def build_megatron_results(
    passes: Sequence[Pass],
    *,
    with_events: bool,
    prompt_text: PromptText,
    token_text: TokenText,
    every: int = 1,
) -> dict[str, object]:
    """Return the contents of the file.

    Args:
        passes: All passes in order.
        with_events: Whether requests have the key `events`.
        prompt_text: Text of `input_prompt`.
        token_text: Text of one token, the key of its log-prob among the best ones.
        every: See `written`.
    """
    last = passes[-1]
    prefilled = sum(one.computed_prefill_token_count + one.recomputed_token_count for one in last.records)
    requests = {
        str(index): _request(record, last.steps, with_events, prompt_text, token_text)
        for index, record in written(last, every)
    }
    return requests | {
        "throughput": [one.throughput for one in passes],
        "mem-max-allocated-bytes": peak_memory(),
        "lifetime_prefill_token_count": prefilled,
        "async_sched_step_count": 0,
        "async_sched_compaction_step_count": 0,
    }


def _request(
    record: RequestRecord, steps: int, with_events: bool, prompt_text: PromptText, token_text: TokenText
) -> dict[str, object]:
    entry: dict[str, object] = {
        "input_prompt": prompt_text(record),
        "generated_text": record.generated_text,
        "generated_tokens": list(record.generated_tokens),
        "latency": record.latency,
        "ttft": record.ttft,
        "cuda_graph_request_count_map": None,
        "step_count": steps,
        "top_n_logprobs": _top_n(record.generated_top_n_log_probs, token_text),
        "prompt_top_n_logprobs": _top_n(record.prompt_top_n_log_probs, token_text),
    }
    if record.generated_log_probs is not None:
        prompt, generated = list(record.prompt_log_probs or ()), list(record.generated_log_probs)
        entry |= {"prompt_logprobs": prompt, "generated_logprobs": generated, "logprobs": [*prompt, *generated]}
    if with_events:
        entry["events"] = _events(record)
    return entry


def _top_n(positions: Sequence[TopN] | None, token_text: TokenText) -> list[dict[str, float]] | None:
    """Return the best tokens by their texts; of tokens with equal text, the best one."""
    if positions is None:
        return None
    named: list[dict[str, float]] = []
    for position in positions:
        best: dict[str, float] = {}
        for token, log_prob in position.items():
            text = token_text(token)
            best[text] = max(log_prob, best.get(text, log_prob))
        named.append(best)
    return named


def _events(record: RequestRecord) -> list[dict[str, object]]:
    """Return events with wall clock times, as Megatron reports them."""
    start = record.events[0].timestamp

    def with_wall_time(event: Event) -> dict[str, object]:
        return event.to_dict() | {"timestamp": record.arrival_wall_time + event.timestamp - start}

    return [with_wall_time(event) for event in record.events if event.type not in _OURS_ALONE]
