"""Entries of requests in the JSON results: Megatron's keys with its types, and our own beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.offline.passes import Pass
from megatron_ext.offline.prompt_texts import PromptText
from megatron_ext.scheduling.record import RequestRecord, TopN
from megatron_ext.text.excerpt import excerpt


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
                best[text] = max(log_prob, best.get(text, log_prob))
            named.append(best)
        return named
