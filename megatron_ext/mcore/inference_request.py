"""Conversion of Megatron's `SamplingParams` to `RequestParams`, and of records to its `DynamicInferenceRequest`.

Requests have the fields of 0.19 on every version.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.inference.contexts.dynamic_context import ContextOverflowError
from megatron.core.inference.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    Status,
)
from megatron.core.inference.inference_request import DynamicInferenceRequest as _UpstreamRequest
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord as _UpstreamRecord
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling import record as records
from megatron_ext.scheduling.record import RequestRecord, TopN
from megatron_ext.scheduling.request_events import Event, EventType
from megatron_ext.scheduling.routing_indices import RoutingIndices

# Fields of Megatron's class, of this version or a newer one, that become fields of ours under another name or type.
_CONVERTED = frozenset({"num_tokens_to_generate", "num_tokens_total", "stop_words"})
# Fields that other code honours: `add_BOS` comes before the conversion; records always have the prompt's tokens; the
# deprecated one follows from two others, and an interval means nothing without streaming.
_HONOURED_ELSEWHERE = frozenset(
    {"add_BOS", "return_prompt_tokens", "return_prompt_top_n_logprobs", "streaming_interval"}
)
# Fields that are refused if they are set, each with the remedy.
_REFUSED = {
    "return_segments": "texts of single tokens are not returned; leave it out",
    "streaming": "results are returned whole; leave it out, and stream from the server or from LoadedEngine.stream()",
}
_COPIED = frozenset(RequestParams.__dataclass_fields__) - _CONVERTED  # fields of ours, also by `add_attributes`
_ERRORS = (EventType.ERROR_TRANSIENT, EventType.ERROR_NONTRANSIENT)
_OLD_NAMES = {"ADD_ENGINE": "ADD"}  # of events, in 0.16


def default_of(one: dataclasses.Field[object]) -> object:
    """Return the default of a dataclass's field; `MISSING` without one."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def check_known(params: SamplingParams) -> None:
    """Check that every field, and every attribute that a caller has added, is honoured or has its default.

    Raises:
        ConfigError: One does not; names it.
    """
    defaults = {one.name: default_of(one) for one in dataclasses.fields(params)}  # of a newer version, too
    known = _COPIED | _CONVERTED | _HONOURED_ELSEWHERE
    for name, value in vars(params).items():
        if name in _REFUSED:
            if value:
                raise ConfigError(f"{name} {value!r}: {_REFUSED[name]}")
        elif name not in known and value != defaults.get(name, dataclasses.MISSING):
            raise ConfigError(f"{name} {value!r} is not a sampling parameter here; leave it out")


def to_request_params(
    params: SamplingParams | RequestParams | None, prompt_length: int, max_sequence_length: int
) -> RequestParams:
    """Convert the parameters; `num_tokens_total`, or no length at all, becomes a number of tokens to generate.

    Raises:
        ConfigError: Invalid values, or a field that is not honoured.
    """
    if params is None:
        return RequestParams()
    if isinstance(params, RequestParams):
        return params
    check_known(params)
    count = params.num_tokens_to_generate
    if params.num_tokens_total is not None:
        if count is not None:
            raise ConfigError(
                f"num_tokens_total {params.num_tokens_total} and num_tokens_to_generate {count} contradict each other; "
                "set one of them to None"
            )
        count = params.num_tokens_total - prompt_length
        if count < 1:
            raise ConfigError(
                f"num_tokens_total {params.num_tokens_total} leaves no token to generate after a prompt of "
                f"{prompt_length} tokens; give at least {prompt_length + 1}"
            )
    if count is None:  # as many as fit; the engine's limits refuse a prompt that leaves no room
        count = max(1, max_sequence_length - prompt_length)
    copied = {name: value for name, value in vars(params).items() if name in _COPIED}
    stop_words = params.stop_words or ()
    return RequestParams(
        num_tokens_to_generate=count,
        stop_words=(
            # `RequestParams` refuses a single string
            stop_words if isinstance(stop_words, str) else tuple(stop_words)  # type: ignore[arg-type]
        ),
        **copied,
    )


@dataclass(kw_only=True)
class _CurrentRequest(_UpstreamRequest):
    """Megatron's request of an older version, with the fields that 0.19 has in addition."""

    prompt_length: int | None = None
    tpot: list[float] = field(default_factory=list)
    policy_epoch: list[tuple[int, int]] | None = None
    kv_cache_epoch: list[tuple[int, int]] | None = None
    routing_indices: np.ndarray | None = None
    cg_wait_iters: int = 0
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    num_cached_tokens: int = 0
    precomputed_block_hashes: list[int] = field(default_factory=list)
    ttft: float | None = None
    event_add_engine: DynamicInferenceEvent | None = field(default=None, repr=False)

    def serialize(self) -> dict[str, object]:
        """Return a dict for msgpack, in which 0.19 writes no event twice and arrays as lists."""
        written: dict[str, object] = super().serialize()
        del written["event_add_engine"]
        if self.routing_indices is not None:
            array = self.routing_indices
            written["routing_indices"] = ("ndarray", {"data": array.tolist(), "dtype": str(array.dtype)})
        return written


if TYPE_CHECKING:
    from megatron.core.inference.inference_request import DynamicInferenceRequest as DynamicInferenceRequest
    from megatron.core.inference.inference_request import DynamicInferenceRequestRecord as DynamicInferenceRequestRecord
else:
    _names = [{one.name for one in dataclasses.fields(kind)} for kind in (_UpstreamRequest, _CurrentRequest)]
    DynamicInferenceRequest = _UpstreamRequest if _names[0] == _names[1] else _CurrentRequest
    """Megatron's own class, or a subclass of it where that lacks fields of 0.19."""
    DynamicInferenceRequestRecord = _UpstreamRecord


@dataclass(frozen=True)
class RequestConversion:
    """Conversion of the records of one engine.

    Attributes:
        detokenize: Function from token ids to their text.
        eod: Token that ends a document; None if the tokenizer has none.
        block_size: Tokens of a KV block.
        is_caching: Whether prefix caching is on.
        device: Device of prompt tokens.
        has_pause_events: Whether events include pauses.
    """

    detokenize: Callable[[Sequence[int]], str]
    eod: int | None
    block_size: int
    is_caching: bool
    device: torch.device
    has_pause_events: bool = True

    def convert(self, record: RequestRecord, params: SamplingParams, count: int) -> DynamicInferenceRequest:
        """Convert a record.

        As in Megatron, generated tokens end before a stop word, unless the request keeps it in the text.

        Args:
            record: Record of a request that has ended.
            params: Parameters of the request as its caller gave them.
            count: Maximum number of tokens to generate that resulted from them.
        """
        kept = self._kept_token_count(record, params)
        events = self._events(record)
        request = DynamicInferenceRequest(
            request_id=record.request_id,
            prompt=self.detokenize(record.prompt_tokens) if record.prompt_text is None else record.prompt_text,
            prompt_tokens=torch.tensor(record.prompt_tokens, dtype=torch.int64, device=self.device),
            prompt_length=len(record.prompt_tokens),
            sampling_params=self._resolved(params, count),
            arrival_time=record.arrival_wall_time,
            status=Status.COMPLETED if record.status is records.Status.COMPLETED else Status.FAILED,
            generated_text=self._text(record, params),
            generated_tokens=list(record.generated_tokens[:kept]),
            generated_length=kept,
            prompt_log_probs=_listed(record.prompt_log_probs, is_asked=params.return_log_probs),
            generated_log_probs=_listed((record.generated_log_probs or ())[:kept], is_asked=params.return_log_probs),
            prompt_top_n_logprobs=self._texts(record.prompt_top_n_log_probs or (), params),
            generated_top_n_logprobs=self._texts((record.generated_top_n_log_probs or ())[:kept], params),
            latency=record.latency,
            ttft=record.ttft,
            routing_indices=None if record.routing_indices is None else _array(record.routing_indices),
            num_cached_tokens=record.skipped_prefill_token_count,
            events=events,
            event_add_engine=next(iter(events), None),
        )
        # Set afterwards: with them the constructor would hash the prompt in upstream's way.
        request.block_size_tokens, request.enable_prefix_caching = self.block_size, self.is_caching
        return request

    def _resolved(self, params: SamplingParams, count: int) -> SamplingParams:
        resolved = copy.deepcopy(params)
        resolved.num_tokens_to_generate, resolved.num_tokens_total = count, None
        if resolved.termination_id is None:
            resolved.termination_id = -1 if self.eod is None else self.eod
        return resolved

    def _kept_token_count(self, record: RequestRecord, params: SamplingParams) -> int:
        """Return the number of generated tokens before the stop word that ended a request; all if none did."""
        tokens, words = record.generated_tokens, params.stop_words or ()
        if record.finish_reason != "stop" or getattr(params, "detokenize_stop_sequence", False):
            return len(tokens)
        full = self.detokenize(tokens) if words else ""
        if not any(word in full for word in words):
            return len(tokens)
        kept = len(tokens)
        while kept and len(self.detokenize(tokens[: kept - 1])) >= len(record.generated_text):
            kept -= 1
        return kept

    def _text(self, record: RequestRecord, params: SamplingParams) -> str:
        """Return the generated text; as in Megatron, another end token than the tokenizer's is part of it."""
        tokens = record.generated_tokens
        is_shown = params.termination_id != self.eod and tokens[-1:] == (params.termination_id,)
        return self.detokenize(tokens) if is_shown else record.generated_text

    def _texts(self, tops: Sequence[TopN], params: SamplingParams) -> list[dict[str, float]] | None:
        if not params.top_n_logprobs:
            return None
        return [{self.detokenize([token]): value for token, value in top.items()} for top in tops]

    def _events(self, record: RequestRecord) -> list[DynamicInferenceEvent]:
        if not record.events:
            return []
        offset = record.arrival_wall_time - record.events[0].timestamp  # from the monotonic clock to the epoch
        wanted = [one for one in record.events if self.has_pause_events or one.type is not EventType.PAUSE]
        found = [_event(one, record, offset) for one in wanted]
        return [one for one in found if one is not None]


def _event(event: Event, record: RequestRecord, offset: float) -> DynamicInferenceEvent | None:
    """Return Megatron's event; None if the version has no such type."""
    name = event.type.name
    found = {one.name: one for one in DynamicInferenceEventType}
    kind = found.get(name) or found.get(_OLD_NAMES.get(name, ""))
    if kind is None:
        return None
    payload: object = event.payload
    if event.type in _ERRORS:
        is_transient = event.type is EventType.ERROR_TRANSIENT
        payload = ContextOverflowError(record.request_id, str(event.payload), is_transient=is_transient)
    return DynamicInferenceEvent(timestamp=event.timestamp + offset, type=kind, payload=payload)


def _listed(values: Sequence[float] | None, *, is_asked: bool) -> list[float] | None:
    return list(values or ()) if is_asked else None


def _array(routing: RoutingIndices) -> np.ndarray:
    """Return expert numbers, [tokens, MoE layers, k]."""
    return np.frombuffer(bytes(routing.data), np.int32).reshape(-1, routing.layers, routing.topk)
