"""Answers as objects and events of the Messages API. A whole message is the sum of its events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from hashlib import blake2b

from megatron_ext.engine.pausing import ABORT
from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.explanation import Reason
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.anthropic.error_envelope import enveloped
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.openai.answers import AnswerFormat, AnswerReader, CallPart, Piece, Thinking, arguments_of
from megatron_ext.server.openai.responses import Event, EventBuilder
from megatron_ext.text.tool_calls.source import Content
from megatron_ext.text.vocabulary import Vocabulary


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
        self._reader = AnswerReader(answer_format)
        self._content: list[Event] = []
        self._kind = ""  # of the open block, the last one; empty without one
        self._arguments = ""  # of the open call
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

    def feed(self, piece: Piece) -> Iterator[Event]:
        """Yield the events that have become certain with a new piece; the finish reason ends the last block."""
        for part in self._reader.parts(piece.text, piece.reason):
            if isinstance(part, Thinking):
                self._thinking.update(part.text.encode())
                yield from self._part("thinking", {"thinking": "", "signature": ""}, part.text)
            elif isinstance(part, Content):
                yield from self._part("text", {"text": ""}, part.text)
            else:
                yield from self._call(part)
        if piece.reason is not None:
            yield from self._close()

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
        return enveloped(error)

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

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.name is not None:
            yield from self._close()
            call = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.name, "input": {}}
            yield from self._open("tool_use", call)
        self._arguments += part.arguments
        yield self._delta("input_json", {"partial_json": part.arguments})

    def _part(self, kind: str, empty: Event, text: str) -> Iterator[Event]:
        """Yield the events of a piece of text, whose field is named as the kind of its block."""
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind, empty)
        self._content[-1][kind] += text
        yield self._delta(kind, {kind: text})

    def _open(self, kind: str, empty: Event) -> Iterator[Event]:
        self._kind = kind
        self._content.append({"type": kind, **empty})
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **empty}}

    def _close(self) -> Iterator[Event]:
        """End the open block. Clients send only thinking with a signature back; it is not checked then."""
        if not self._kind:
            return
        if self._kind == "thinking":
            self._content[-1]["signature"] = signature = self._thinking.hexdigest()
            yield self._delta("signature", {"signature": signature})
        elif self._kind == "tool_use":
            self._content[-1]["input"] = arguments_of(self._arguments)
            self._arguments = ""
        yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    @property
    def _index(self) -> int:
        return len(self._content) - 1

    def _delta(self, kind: str, new: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": f"{kind}_delta", **new}}
