"""Answers in parts, as server-sent events, and clients that leave before the end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megatron_ext.server.answers import Reply, Scored, finished, generated_scores, usage
from megatron_ext.server.errors import ApiError, ClientGone, engine_fault
from megatron_ext.server.exchange import HttpExchange
from megatron_ext.server.progress import RequestHandle
from megatron_ext.text.stream import TextStream

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, object]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


class _ChoiceStream:
    """The parts of one choice."""

    def __init__(self, index: int, handle: RequestHandle, reply: Reply, detokenize: Callable[..., str]) -> None:
        self._index = index
        self.handle = handle
        self._reply = reply
        self._text = TextStream(handle.job.params.stop_words, detokenize)
        self._is_open = False
        self._seen = 0  # tokens
        self._scores: list[Scored] = []  # of tokens whose text is held back
        self.is_ended = False

    def parts(self) -> Iterator[dict[str, object]]:
        """What has come since the last call, as OpenAI's choices.

        Raises:
            ApiError: The request has failed.
        """
        source = finished(self.handle) if self.handle.record or self.handle.error else self.handle.progress
        if source is None or self.is_ended:
            return
        if not self._is_open:
            self._is_open = True
            opening = self._reply.opening(self._index, source)
            if opening is not None:
                yield opening
        self._scores += generated_scores(source, self._seen)
        seen, self._seen = self._seen, len(source.generated_tokens)
        if source is self.handle.record:
            self.is_ended = True
            yield self._part(self._text.finish(source.generated_text), source.finish_reason)
            return
        text = self._text.feed(source.generated_tokens[seen:])
        if text:
            yield self._part(text, None)

    def _part(self, text: str, reason: str | None) -> dict[str, object]:
        scores, self._scores = self._scores, []
        return self._reply.part(self._index, text, scores, reason)


async def events(
    exchange: HttpExchange, reply: Reply, detokenize: Callable[..., str], *, with_usage: bool
) -> AsyncIterator[bytes]:
    """The events of an answer; what goes wrong on the way is the last one."""
    usage_so_far = {"usage": None} if with_usage else {}
    envelope = reply.envelope(is_part=True)
    streams = [_ChoiceStream(i, handle, reply, detokenize) for i, handle in enumerate(exchange.handles)]
    try:
        while True:
            for stream in streams:
                for part in stream.parts():
                    yield event(envelope | {"choices": [part]} | usage_so_far)
            if all(stream.is_ended for stream in streams):
                break
            await exchange.next_update()
    except ApiError as error:
        yield event(error.to_dict())
        return
    except Exception as error:  # of a text: it is this answer's alone
        logger.exception("a stream failed")
        yield event(engine_fault(error).to_dict())
        return
    if with_usage:
        records = [finished(handle) for handle in exchange.handles]
        yield event(envelope | {"choices": [], "usage": usage(reply, records)})
    yield DONE


class EventStream(Response):
    """Sends events as they come; when the client leaves, or anything else ends it, the exchange is aborted.

    Args:
        exchange: That the events are of.
        source: The events.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: HttpExchange, source: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client reads."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            return
        finally:
            self._exchange.abort()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for content in self._source:
            await send({"type": "http.response.body", "body": content, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[object, None, None]) -> None:
    """Do `work` while the client is there.

    Args:
        receive: Of the request, whose body has been read.
        work: Cancelled when the client leaves.

    Raises:
        ClientGone: The client has left.
    """
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGone
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
