"""Answers as objects and events of the Messages API. A whole message is the sum of its events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from megatron_ext.engine.pausing import ABORT
from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.explanation import Reason
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.openai.answers import AnswerPart, CallPart, ScoredPart, Thinking, arguments_of
from megatron_ext.server.openai.responses import Event, EventBuilder
from megatron_ext.text.tool_calls.formats import AnswerFormat
from megatron_ext.text.tool_calls.source import Content
from megatron_ext.text.vocabulary import Vocabulary

# Types of the deltas of a block, and their fields.
_DELTAS = {
    Thinking: ("thinking_delta", "thinking"),
    Content: ("text_delta", "text"),
    CallPart: ("input_json_delta", "partial_json"),
}


class MessageBuilder(EventBuilder):
    """Builder of one answer.

    Args:
        model: Name of the model, as the client has given it.
        vocabulary: Vocabulary that decodes tokens.
        answer_format: Format of the answer's thinking and tool calls.

    Attributes:
        message: The message so far.
    """

    def __init__(self, model: str, vocabulary: Vocabulary, answer_format: AnswerFormat) -> None:
        super().__init__(f"msg_{uuid.uuid4().hex}", vocabulary, answer_format)
        self._content: list[Event] = []
        self._thinking = blake2b(digest_size=16)
        self.message: Event = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, source: Progress | RequestRecord) -> Iterator[Event]:
        """Yield the first events, with the usage of the prompt."""
        yield {"type": "message_start", "message": {**self.message, "content": [], "usage": self._usage(source, 0)}}
        yield {"type": "ping"}

    def finish(self, record: RequestRecord) -> list[Event]:
        """Return the events with the usage, and the reason why the answer has ended."""
        reason, sequence = self._stop(record)
        usage = self._usage(record, len(record.generated_tokens))
        if thinking := self.thinking_length(record):
            usage["output_tokens_details"] = {"thinking_tokens": thinking}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        self.message |= {**delta, "usage": usage}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> Event:
        """Return the last event of an answer that has failed."""
        return error.to_dict()

    def _stop(self, record: RequestRecord) -> tuple[str, str | None]:
        if record.finish_reason == "length":
            params, count = record.params, len(record.generated_tokens)
            is_cut = params is not None and count < params.num_tokens_to_generate
            return "model_context_window_exceeded" if is_cut else "max_tokens", None
        if record.finish_reason == ABORT:
            return "pause_turn", None
        if record.stop_word is not None:
            return "stop_sequence", record.stop_word
        return "tool_use" if self._reader.call_count else "end_turn", None

    def _usage(self, source: Progress | RequestRecord, generated: int) -> Event:
        prompt = len(source.prompt_tokens)
        read = source.skipped_prefill_token_count if self.shows_cache else 0
        created = source.prefill_reasons.get(Reason.NOT_CACHED.value, 0) if self.shows_cache else 0
        return {
            "input_tokens": prompt - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": generated,
        }

    def _begin_block(self, part: AnswerPart) -> Iterator[Event]:
        if isinstance(part, CallPart):
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            block: Event = {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}
        elif isinstance(part, Thinking):
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._content.append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def _delta(self, text: str, scores: Sequence[ScoredPart]) -> Iterator[Event]:
        assert self._open is not None, "its block has begun"
        kind, field = _DELTAS[self._open]
        yield self._event("content_block_delta", delta={"type": kind, field: text})

    def _end_block(self, text: str, reason: str | None) -> Iterator[Event]:
        """Yield the end of the open block. Clients send only thinking with a signature back; it is not checked then."""
        block = self._content[-1]
        if self._open is Thinking:
            self._thinking.update(text.encode())
            signature = self._thinking.hexdigest()
            block |= {"thinking": text, "signature": signature}
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": signature})
        elif self._open is CallPart:
            block["input"] = arguments_of(text)
        else:
            block["text"] = text
        yield self._event("content_block_stop")

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": kind, "index": len(self._content) - 1, **fields}
