"""Streamed responses as server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron_ext.engine.updates import Progress
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.api_errors import ApiError, ClientGone, engine_fault
from megatron_ext.server.openai.answers import Piece, Scored, generated_scores
from megatron_ext.server.openai.request_fields import StreamOptions
from megatron_ext.server.openai.responses import (
    AnswerBuilder,
    Event,
    EventBuilder,
    ResponseBuilder,
    experts_of,
    explained,
    finished,
    usage,
    usage_so_far,
    versions_of,
)
from megatron_ext.server.request_manager import RequestGroup, RequestHandle
from megatron_ext.text.detokenizer import TextStream

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, object]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


def named_event(content: dict[str, object]) -> bytes:
    """Return a server-sent event that is named as its content's type."""
    return f"event: {content['type']}\n".encode() + event(content)


class PieceReader:
    """Reader of the pieces of one choice, while it is generated or afterwards.

    Args:
        handle: Handle of its request.
        builder: Builder of its answer; with scores, a piece has the tokens that its text came with and no more.
    """

    def __init__(self, handle: RequestHandle, builder: AnswerBuilder) -> None:
        self._handle, params = handle, handle.inputs.params
        self._splits = builder.has_scores
        decoder = builder.vocabulary.decoder(skips_special=params.skip_special_tokens)
        self._text = TextStream(params.stop_words, decoder)
        self._seen = 0  # tokens
        self._held: tuple[list[int], list[Scored]] = [], []  # tokens whose text is held back, and their scores
        self.is_ended = False

    def read(self) -> Iterator[Piece]:
        """Yield the new pieces since the last call; the last one of all has the finish reason.

        Raises:
            ApiError: The request has failed.
        """
        source = source_of(self._handle)
        if source is None or self.is_ended:
            return
        new, scores = source.generated_tokens[self._seen :], generated_scores(source, self._seen)
        self._seen += len(new)
        is_last = source is self._handle.result
        if self._splits:  # one by one; of an answer that has ended, the last token goes with the finish reason below
            for place in range(len(new) - is_last):
                yield from self._fed(new[place : place + 1], scores[place : place + 1])
            new, scores = (new[-1:], scores[-1:]) if is_last else ([], [])
        if not is_last:
            yield from self._fed(new, scores)
            return
        assert isinstance(source, RequestRecord), "it is the handle's record"
        self.is_ended = True
        held_tokens, held_scores = self._held
        text = self._text.finish(source.generated_text)
        yield Piece(text, held_tokens + list(new), held_scores + scores, source.finish_reason)

    def _fed(self, new: Sequence[int], scores: Sequence[Scored]) -> Iterator[Piece]:
        held_tokens, held_scores = self._held
        held_tokens += new
        held_scores += scores
        text = self._text.feed(new)
        if text:
            self._held = [], []
            yield Piece(text, held_tokens, held_scores)


@dataclass(eq=False)
class _ChoiceStream:
    """Stream of one choice.

    Args:
        index: Index of the choice.
        handle: Handle of its request.
        first: Handle of the prompt's first choice, which has the prompt's data.
        builder: Builder of its parts.
    """

    index: int
    handle: RequestHandle
    first: RequestHandle
    builder: ResponseBuilder
    _is_open: bool = False
    _token_count: int = 0  # in the parts so far

    def __post_init__(self) -> None:
        self._reader = PieceReader(self.handle, self.builder)

    @property
    def is_ended(self) -> bool:
        """True after the last part."""
        return self._reader.is_ended

    def parts(self) -> Iterator[dict[str, object]]:
        """Yield the new parts since the last call, as fields beside the envelope.

        Raises:
            ApiError: The request has failed.
        """
        source, first = source_of(self.handle), source_of(self.first)
        if source is None or first is None or self.is_ended:
            return
        if not self._is_open:
            self._is_open = True
            opening = self.builder.opening(self.index, first)
            if opening is not None:
                yield self.builder.heading(source) | {"choices": [opening]}
        for piece in self._reader.read():
            part = self.builder.part(self.index, piece)
            start, self._token_count = self._token_count, self._token_count + len(piece.tokens)
            if part is not None:
                part |= versions_of(self.builder, source, start, self._token_count)
                if isinstance(source, RequestRecord):
                    part |= explained(self.builder, self.index, source)
                    part |= experts_of(self.builder, source) if self.is_ended else {}
                yield {"choices": [part]}


def source_of(handle: RequestHandle) -> Progress | RequestRecord | None:
    """Return what a request has generated so far; None before its first token.

    Raises:
        ApiError: The request has failed.
    """
    return finished(handle) if handle.has_ended else handle.progress


async def events(group: RequestGroup, builder: ResponseBuilder, options: StreamOptions | None) -> AsyncIterator[bytes]:
    """Yield the events of a response; an error on the way is the last event.

    Args:
        group: Group of the requests.
        builder: Builder of the response.
        options: Whether an extra event at the end has the usage, and whether each part has the usage so far.
    """
    ends_with_usage = options is not None and options.include_usage
    continues_usage = options is not None and options.continuous_usage_stats
    envelope, handles = builder.envelope(is_part=True), group.handles
    streams = [_ChoiceStream(i, handle, handles[i - i % builder.choices], builder) for i, handle in enumerate(handles)]
    usage_now: dict[str, object] = {"usage": None} if ends_with_usage else {}
    try:
        while True:
            for stream in streams:
                for part in stream.parts():
                    if continues_usage:
                        usage_now = {"usage": usage_so_far(builder, handles)}
                    yield event(envelope | part | usage_now)
            if all(stream.is_ended for stream in streams):
                break
            await group.next_update()
    except Exception as error:
        yield event(failure_of(error).to_dict())
        return
    if ends_with_usage:
        records = [finished(handle) for handle in group.handles]
        yield event(envelope | {"choices": [], "usage": usage(builder, records)})
    yield DONE


async def typed_events(
    group: RequestGroup, builder: EventBuilder, on_end: Callable[[], None] = lambda: None
) -> AsyncIterator[Event]:
    """Yield the events of an answer.

    Args:
        group: Group of one request, which has started.
        builder: Builder of the answer.
        on_end: Called when the answer is complete, before the last events.

    Raises:
        ApiError: The request has failed.
    """
    (handle,) = group.handles
    pieces = PieceReader(handle, builder)
    source = handle.result or handle.progress or finished(handle)  # also of a request that has failed since it started
    for one in builder.begin(source):
        yield one
    while True:
        for piece in pieces.read():
            for one in builder.feed(piece):
                yield one
        if pieces.is_ended:
            break
        await group.next_update()
    last = builder.finish(finished(handle))
    on_end()
    for one in last:
        yield one


async def named_events(events: AsyncIterator[Event], builder: EventBuilder) -> AsyncIterator[bytes]:
    """Yield events as a client gets them; an error on the way is the last event."""
    try:
        async for one in events:
            yield named_event(one)
    except Exception as error:
        yield named_event(builder.fail(failure_of(error)))


def failure_of(error: Exception) -> ApiError:
    """Return what a client is told of an error that ends a stream; one of the server is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):  # the tokenizer cannot decode the tokens
        return ApiError(400, str(error))
    logger.exception("a stream failed")  # in decoding: it affects this response only
    return engine_fault(error)


class EventStream(StreamingResponse):
    """Response that sends events as they come; the group is aborted if the client disconnects or sending fails.

    Args:
        group: Request group of the events.
        source: Source of the events.
    """

    media_type = "text/event-stream"

    def __init__(self, group: RequestGroup, source: AsyncIterator[bytes]) -> None:
        super().__init__(source, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._group = group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or those before the client disconnects."""
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientGone:
            return
        finally:
            self._group.abort()


async def while_connected(receive: Receive, work: Coroutine[object, None, Result]) -> Result:
    """Run `work` while the client is connected.

    Args:
        receive: ASGI `receive` of the request, whose body has been read.
        work: Awaitable that is cancelled if the client disconnects.

    Returns:
        Result of `work`.

    Raises:
        ClientGone: The client has disconnected.
    """
    working, disconnecting = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        disconnecting.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
