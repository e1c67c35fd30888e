"""Answer of the Responses API: its typed events, and the response object that they add up to.

A whole response is what the events of its one piece add up to, so that it equals a streamed one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

from megatron_ext.engine.pausing import ABORT
from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.explanation import Reason
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.api_errors import FAULT, OVERLOADED, ApiError
from megatron_ext.server.openai.answers import AnswerPart, CallPart, ScoredPart, Thinking
from megatron_ext.server.openai.responses import Event, EventBuilder, explained, usage
from megatron_ext.server.openai.responses_api.response_store import new_id
from megatron_ext.text.tool_calls.formats import AnswerFormat
from megatron_ext.text.tool_calls.source import Content
from megatron_ext.text.vocabulary import Vocabulary

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"
_DETAILS = {"length": "max_output_tokens", ABORT: ABORT}  # of answers that are cut off, by finish reason
# Codes of errors that the API knows, by OpenAI's type of the error.
_CODES = {FAULT: "server_error", OVERLOADED: "rate_limit_exceeded"}
# Names of blocks in events of their texts; of a text, also the type of its part.
_NAMES = {Content: "output_text", Thinking: "reasoning_text", CallPart: "function_call_arguments"}


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
        self._number = 0  # of the next event
        self._place: dict[str, object] = {}  # fields of the open item in events of its parts
        self._scores: list[dict[str, object]] = []  # log-probs of the open item's tokens
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
            self._fill("".join(self._texts), INCOMPLETE)
        self.response["status"] = FAILED
        self.response["error"] = {"code": _CODES.get(error.kind, "invalid_prompt"), "message": error.message}
        return self._event("response.failed", response=self.response)

    def _event(self, kind: str, **fields: object) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _begin_block(self, part: AnswerPart) -> Iterator[Event]:
        """Yield the first events of a new item."""
        if isinstance(part, CallPart):
            item = self._item("fc", "function_call")
            item |= {"call_id": f"call_{uuid.uuid4().hex[:24]}", "name": part.name, "arguments": ""}
        elif isinstance(part, Thinking):
            item = self._item("rs", "reasoning") | {"summary": [], "content": []}
        else:
            item = self._item("msg", "message") | {"role": "assistant", "content": []}
        index, self._scores = len(self.output), []
        self._place = {"item_id": item["id"], "output_index": index}
        yield self._event("response.output_item.added", output_index=index, item=dict(item))
        self.output.append(item)
        if not isinstance(part, CallPart):
            self._place["content_index"] = 0
            yield self._event("response.content_part.added", **self._place, part=self._part(""))

    def _item(self, prefix: str, kind: str) -> dict[str, object]:
        return {"id": new_id(prefix, self._tag), "type": kind, "status": IN_PROGRESS}

    def _delta(self, text: str, scores: Sequence[ScoredPart]) -> Iterator[Event]:
        assert self._open is not None, "its item has begun"
        if self._open is CallPart and not text:
            return
        fields: dict[str, object] = {**self._place, "delta": text}
        if self._open is Content:
            fields["logprobs"] = shown = [one.to_dict(self.vocabulary) for one in scores]
            self._scores += shown
        yield self._event(f"response.{_NAMES[self._open]}.delta", **fields)

    def _end(self, reason: str) -> Iterator[Event]:
        """Yield the events of the end; an answer without any output is an empty message."""
        if not self.output:
            yield from self._take(Content(""))
        yield from self._close(reason)

    def _end_block(self, text: str, reason: str | None) -> Iterator[Event]:
        """Yield the events of the end of the open item."""
        item = self._fill(text, INCOMPLETE if reason in _DETAILS else COMPLETED)
        if self._open is CallPart:
            done = {"name": item["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", **self._place, **done)
        else:
            part = self._part(text)
            scores = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(f"response.{part['type']}.done", **self._place, text=text, **scores)
            yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=self._place["output_index"], item=dict(item))

    def _fill(self, text: str, status: str) -> dict[str, object]:
        """Write the status and what there is of the text into the open item, and return it."""
        item = self.output[-1]
        item["status"] = status
        item |= {"arguments": text} if self._open is CallPart else {"content": [self._part(text)]}
        return item

    def _part(self, text: str) -> dict[str, object]:
        """Return the only part of the open item's content."""
        assert self._open is not None, "its item has begun"
        part: dict[str, object] = {"type": _NAMES[self._open], "text": text}
        return part | {"annotations": [], "logprobs": list(self._scores)} if self._open is Content else part

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
