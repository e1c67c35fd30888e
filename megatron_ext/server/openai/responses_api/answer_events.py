"""Answer of the Responses API: its typed events, and the response object that they add up to.

A whole response is what the events of its one piece add up to, so that it equals a streamed one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ext.engine.pausing import ABORT
from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.explanation import Reason
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.api_errors import FAULT, OVERLOADED, ApiError
from megatron_ext.server.openai.answers import AnswerFormat, CallPart, Piece, ScoredPart, ScoredReader, Thinking
from megatron_ext.server.openai.responses import Event, EventBuilder, explained, usage
from megatron_ext.server.openai.responses_api.response_store import new_id
from megatron_ext.text.vocabulary import Vocabulary

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
_DETAILS = {"length": "max_output_tokens", ABORT: ABORT}  # of answers that are cut off, by finish reason
# Codes of errors that the API knows, by OpenAI's type of the error.
_CODES = {FAULT: "server_error", OVERLOADED: "rate_limit_exceeded"}


@dataclass(frozen=True)
class _Kind:
    """Kind of an item with text: prefix of its id, type of its part, and name in the events of its text."""

    prefix: str
    part: str
    event: str


_MESSAGE = _Kind("msg", "output_text", "response.output_text")
_REASONING = _Kind("rs", "reasoning_text", "response.reasoning_text")


@dataclass
class _OpenItem:
    """Item that the model is writing.

    Attributes:
        item: The item, as the response has it.
        place: Fields of the item in events of its parts.
        kind: Kind of an item with text; None for a call.
        texts: Pieces of its text or arguments.
        scores: Log-probs of its tokens.
    """

    item: dict[str, object]
    place: dict[str, object]
    kind: _Kind | None
    texts: list[str] = field(default_factory=list)
    scores: list[dict[str, object]] = field(default_factory=list)

    def part(self) -> dict[str, object]:
        """Return the only part of its content."""
        assert self.kind is not None, "calls have no parts"
        part: dict[str, object] = {"type": self.kind.part, "text": "".join(self.texts)}
        return part | {"annotations": [], "logprobs": list(self.scores)} if self.kind is _MESSAGE else part

    def fill(self, status: str) -> None:
        """Write what there is into the item."""
        self.item["status"] = status
        if self.kind is None:
            self.item["arguments"] = "".join(self.texts)
        else:
            self.item["content"] = [self.part()]


class ResponseAnswer(EventBuilder):
    """Answer to one request.

    Args:
        fields: Fields of the response that repeat the request.
        answer_format: Format of the answer's thinking and calls.
        vocabulary: Vocabulary that decodes single tokens.
        tag: Tag of this process in ids.
        shows_ids: Whether the response has the token ids as well.

    Attributes:
        response: The response object so far.
    """

    def __init__(
        self,
        fields: Mapping[str, object],
        answer_format: AnswerFormat,
        vocabulary: Vocabulary,
        tag: str,
        *,
        shows_ids: bool = False,
    ) -> None:
        super().__init__(new_id("resp", tag), vocabulary, answer_format)
        self._tag = tag
        self._shows_ids = shows_ids
        self._reader = ScoredReader(answer_format, vocabulary)
        self._number = 0  # of the next event
        self._open: _OpenItem | None = None
        self.output: list[dict[str, object]] = []
        self.response: dict[str, object] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": IN_PROGRESS,
            "error": None,
            "incomplete_details": None,
            "output": self.output,
            "usage": None,
            **fields,
        }

    def begin(self, source: Progress | RequestRecord) -> Iterator[Event]:
        """Yield the events before any output."""
        for name in ("created", IN_PROGRESS):
            yield self._event(f"response.{name}", response=dict(self.response))

    def feed(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of the next piece; the last one closes all items."""
        for part, scores in self._reader.read(piece).parts:
            if isinstance(part, CallPart):
                if part.name is not None:
                    yield from self._begin_call(part.name)
                if part.arguments:
                    yield self._delta("response.function_call_arguments", part.arguments)
            else:
                yield from self._text(_REASONING if isinstance(part, Thinking) else _MESSAGE, part.text, scores)
        if piece.reason is not None:
            yield from self._end(INCOMPLETE if piece.reason in _DETAILS else COMPLETED)

    def finish(self, record: RequestRecord) -> list[Event]:
        """Return the last event, after the last piece."""
        details = _DETAILS.get(record.finish_reason or "")
        status = COMPLETED if details is None else INCOMPLETE
        self.response["status"] = status
        if details is not None:
            self.response["incomplete_details"] = {"reason": details}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = self._usage(record)
        self.response |= explained(self, 0, record)
        if self._shows_ids:
            self.response["prompt_token_ids"] = list(record.prompt_tokens)
            self.response["token_ids"] = list(record.generated_tokens)
        return [self._event(f"response.{status}", response=self.response)]

    def fail(self, error: ApiError) -> Event:
        """Return the last event of an answer that has failed; an item that was being written is not complete."""
        if self._open is not None:
            self._open.fill(INCOMPLETE)
        self.response["status"] = FAILED
        self.response["error"] = {"code": _CODES.get(error.kind, "invalid_prompt"), "message": error.message}
        return self._event("response.failed", response=self.response)

    def _event(self, kind: str, **fields: object) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _begin(self, item: dict[str, object], kind: _Kind | None) -> Iterator[Event]:
        """Yield the events that end the previous item, then the first events of a new item."""
        yield from self._close(COMPLETED)
        place: dict[str, object] = {"item_id": item["id"], "output_index": len(self.output)}
        if kind is not None:
            place["content_index"] = 0
        self._open = _OpenItem(item, place, kind)
        yield self._event("response.output_item.added", output_index=len(self.output), item=dict(item))
        self.output.append(item)
        if kind is not None:
            yield self._event("response.content_part.added", **place, part=self._open.part())

    def _begin_call(self, name: str) -> Iterator[Event]:
        yield from self._begin(
            {
                "id": new_id("fc", self._tag),
                "type": "function_call",
                "status": IN_PROGRESS,
                "call_id": f"call_{uuid.uuid4().hex[:24]}",
                "name": name,
                "arguments": "",
            },
            None,
        )

    def _text(self, kind: _Kind, text: str, scores: Sequence[ScoredPart] = ()) -> Iterator[Event]:
        """Yield the events of a piece of text."""
        if self._open is None or self._open.kind is not kind:
            item: dict[str, object] = {"id": new_id(kind.prefix, self._tag)}
            if kind is _MESSAGE:
                item |= {"type": "message", "role": "assistant", "status": IN_PROGRESS, "content": []}
            else:
                item |= {"type": "reasoning", "status": IN_PROGRESS, "summary": [], "content": []}
            yield from self._begin(item, kind)
        yield self._delta(kind.event, text, scores)

    def _delta(self, kind: str, text: str, scores: Sequence[ScoredPart] = ()) -> Event:
        opened = self._open
        assert opened is not None, "parts come after the beginning of their item"
        opened.texts.append(text)
        fields: dict[str, object] = {**opened.place, "delta": text}
        if opened.kind is _MESSAGE:
            fields["logprobs"] = shown = [one.to_dict(self._vocabulary) for one in scores]
            opened.scores += shown
        return self._event(f"{kind}.delta", **fields)

    def _end(self, status: str) -> Iterator[Event]:
        """Yield the events of the end; an answer without any output is an empty message."""
        if not self.output:
            yield from self._text(_MESSAGE, "")
        yield from self._close(status)

    def _close(self, status: str) -> Iterator[Event]:
        """Yield the events of the end of the item that is being written."""
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.fill(status)
        text = "".join(opened.texts)
        if opened.kind is None:
            name = opened.item["name"]
            yield self._event("response.function_call_arguments.done", **opened.place, name=name, arguments=text)
        else:
            part = opened.part()
            scores = {"logprobs": part["logprobs"]} if opened.kind is _MESSAGE else {}
            yield self._event(f"{opened.kind.event}.done", **opened.place, text=text, **scores)
            yield self._event("response.content_part.done", **opened.place, part=part)
        index = opened.place["output_index"]
        yield self._event("response.output_item.done", output_index=index, item=dict(opened.item))

    def _usage(self, record: RequestRecord) -> dict[str, object]:
        """Return the usage under the names of this API; counts that are hidden are 0, since clients expect them."""
        counts = usage(self, [record])
        cached, thought = counts.get("prompt_tokens_details"), counts.get("completion_tokens_details")
        written = record.prefill_reasons.get(Reason.NOT_CACHED.value, 0) if self.shows_cache else 0
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": written}
            | (cached if isinstance(cached, dict) else {}),
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0} | (thought if isinstance(thought, dict) else {}),
            "total_tokens": counts["total_tokens"],
        }
