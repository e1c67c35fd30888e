"""Answers as objects and events of the Messages API. A whole message is the sum of its events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import blake2b
from typing import Any

from megatron_ext.config import RequestParams
from megatron_ext.engine.pausing import ABORT
from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.anthropic.error_envelope import error_event, server_sent_event
from megatron_ext.server.client.request_group import RequestGroup
from megatron_ext.server.openai.answers import AnswerFormat, AnswerReader, CallPart, Thinking
from megatron_ext.server.openai.responses import AnswerBuilder, Piece, finished
from megatron_ext.server.openai.streaming import PieceReader, failure_of, source_of
from megatron_ext.text.chat_template import INVALID_JSON
from megatron_ext.text.tool_calls.source import Content
from megatron_ext.text.vocabulary import Vocabulary

NOT_CACHED = "not_cached"  # reason of a prompt's tokens that were computed and are cached from now on
Event = dict[str, Any]


class MessageBuilder(AnswerBuilder):
    """Builder of one answer.

    Args:
        model: Name of the model, as the client has given it.
        vocabulary: Vocabulary that decodes tokens.
        answer_format: Format of the answer's thinking and tool calls.
    """

    def __init__(self, model: str, vocabulary: Vocabulary, answer_format: AnswerFormat) -> None:
        super().__init__(f"msg_{uuid.uuid4().hex}", vocabulary, answer_format)
        self._model = model
        self._blocks = _Blocks(answer_format)

    def start(self, source: Progress | RequestRecord) -> Event:
        """Return the first event, with the usage of the prompt."""
        return {"type": "message_start", "message": self._message([], None, None, self._usage(source, 0))}

    def blocks(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of a piece of the answer."""
        yield from self._blocks.feed(piece.text, piece.reason)

    def end(self, record: RequestRecord) -> Event:
        """Return the event with the usage, and the reason why the answer has ended."""
        reason, sequence = self._stop(record)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return {"type": "message_delta", "delta": delta, "usage": self._whole_usage(record)}

    def whole(self, record: RequestRecord) -> Event:
        """Return the whole message."""
        content: list[Event] = []
        arguments: dict[int, str] = {}
        for event in self.blocks(Piece(record.generated_text, reason=record.finish_reason or "")):
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                for name, text in event["delta"].items():
                    if name == "partial_json":
                        arguments[event["index"]] = arguments.get(event["index"], "") + text
                    elif name != "type":
                        content[event["index"]][name] += text
        for index, text in arguments.items():
            content[index]["input"] = _object(text)
        return self._message(content, *self._stop(record), self._whole_usage(record))

    def _message(self, content: list[Event], reason: str | None, sequence: str | None, usage: Event) -> Event:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _stop(self, record: RequestRecord) -> tuple[str, str | None]:
        if record.finish_reason == "length":
            params, count = record.params, len(record.generated_tokens)
            is_cut = params is not None and count < params.num_tokens_to_generate
            return "model_context_window_exceeded" if is_cut else "max_tokens", None
        if record.finish_reason == ABORT:
            return "pause_turn", None
        if record.stop_word is not None:
            return "stop_sequence", record.stop_word
        return "tool_use" if self._blocks.call_count else "end_turn", None

    def _usage(self, source: Progress | RequestRecord, generated: int) -> Event:
        prompt = len(source.prompt_tokens)
        read = source.skipped_prefill_token_count if self.shows_cache else 0
        created = source.prefill_reasons.get(NOT_CACHED, 0) if self.shows_cache else 0
        return {
            "input_tokens": prompt - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": generated,
        }

    def _whole_usage(self, record: RequestRecord) -> Event:
        usage = self._usage(record, len(record.generated_tokens))
        thinking = self.thinking_length(record)
        return usage | {"output_tokens_details": {"thinking_tokens": thinking}} if thinking else usage


class _Blocks:
    """Events of the content blocks of an answer.

    Args:
        answer_format: Format of the answer.
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._reader = AnswerReader(answer_format)
        self._index = -1
        self._kind = ""  # of the open block; empty without one
        self._thinking = blake2b(digest_size=16)

    @property
    def call_count(self) -> int:
        """Number of calls so far."""
        return self._reader.call_count

    def feed(self, text: str, reason: str | None) -> Iterator[Event]:
        """Yield the events that have become certain with a new piece of text; the finish reason ends the last block."""
        for part in self._reader.parts(text, reason):
            if isinstance(part, Thinking):
                self._thinking.update(part.text.encode())
                yield from self._part("thinking", {"thinking": "", "signature": ""}, {"thinking": part.text})
            elif isinstance(part, Content):
                yield from self._part("text", {"text": ""}, {"text": part.text})
            else:
                yield from self._call(part)
        if reason is not None:
            yield from self._close()

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.name is not None:
            yield from self._close()
            call = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": part.name, "input": {}}
            yield from self._open("tool_use", call)
        yield self._delta("input_json", {"partial_json": part.arguments})

    def _part(self, kind: str, empty: Event, new: Event) -> Iterator[Event]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind, empty)
        yield self._delta(kind, new)

    def _open(self, kind: str, empty: Event) -> Iterator[Event]:
        self._index, self._kind = self._index + 1, kind
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **empty}}

    def _close(self) -> Iterator[Event]:
        """End the open block. Clients send only thinking with a signature back; it is not checked then."""
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta("signature", {"signature": self._thinking.hexdigest()})
        yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _delta(self, kind: str, new: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": f"{kind}_delta", **new}}


def _object(arguments: str) -> dict[str, object]:
    """Return the arguments of a call as an object."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {INVALID_JSON: arguments}


async def message_events(
    group: RequestGroup, builder: MessageBuilder, decoder: Callable[[RequestParams], Callable[..., str]]
) -> AsyncIterator[bytes]:
    """Yield the events of an answer; an error on the way is the last event.

    Args:
        group: Group of one request, which has started.
        builder: Builder of the answer.
        decoder: Decoder of a request's params: token ids to text.
    """
    (handle,) = group.handles
    pieces = PieceReader(handle, decoder(handle.inputs.params))
    try:
        source = source_of(handle)
        assert source is not None, "the request has started"
        yield server_sent_event(builder.start(source))
        yield server_sent_event({"type": "ping"})
        while True:
            for piece in pieces.read():
                for event in builder.blocks(piece):
                    yield server_sent_event(event)
            if pieces.is_ended:
                break
            await group.next_update()
        yield server_sent_event(builder.end(finished(handle)))
        yield server_sent_event({"type": "message_stop"})
    except Exception as error:
        yield error_event(failure_of(error))
