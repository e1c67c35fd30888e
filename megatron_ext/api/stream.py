"""What a request gets, part by part, for whoever iterates in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from megatron_ext.engine.client import EngineClient
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.errors import RequestFailed
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.text.stream import TextStream
from megatron_ext.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class StreamPart:
    """What a request got since the part before.

    Put together, the texts are `RequestRecord.generated_text` and the tokens `RequestRecord.generated_tokens`.

    Attributes:
        text: As far as it is certain: half a character, and what may become a stop word, come with a later part. It may
            be empty.
        tokens: At least one, but for the last part.
        finish_reason: "stop" or "length" in the last part, None before.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None


class RequestStream(AsyncIterator[StreamPart]):
    """The parts of one request, which begins with the first of them; in any event loop, by one task at a time.

    Whoever stops reading aborts the request: by leaving the loop (once nothing refers to the stream), by `aclose()`, or
    because the task is cancelled.

    Args:
        begin: Makes the request; called in a thread.
        client: The engine's client.
        vocabulary: Token ids to text.
    """

    def __init__(self, begin: Callable[[], EngineRequest], client: EngineClient, vocabulary: Vocabulary) -> None:
        self._request: EngineRequest | None = None
        self._record: RequestRecord | None = None
        self._is_over = False
        self._begin = begin
        self._client = client
        self._vocabulary = vocabulary
        self._text = TextStream((), vocabulary.detokenize)
        self._seen = 0  # tokens
        self._changed = asyncio.Event()

    @property
    def record(self) -> RequestRecord | None:
        """The whole outcome, once the request has ended by itself."""
        return self._record

    async def __anext__(self) -> StreamPart:
        """The next part, as soon as there is one.

        Raises:
            ConfigError: The prompt or the parameters make no sense.
            EngineSuspended: Nothing can begin now.
            EngineClosed: The engine is closed, or was closed meanwhile.
            RequestFailed: The request ended without being completed.
        """
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._request is None:
                await self._submit()
            while (part := self._next_part()) is None:
                await self._changed.wait()
                self._changed.clear()
        except BaseException:  # the task is cancelled, too
            self._leave()
            raise
        return part

    async def aclose(self) -> None:
        """Read no more: the request is aborted unless it has ended."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    async def _submit(self) -> None:
        self._request = request = await asyncio.to_thread(self._begin)
        request.is_streamed = True
        # No reference to the stream itself, so that it goes when its reader goes.
        request.notify = partial(asyncio.get_running_loop().call_soon_threadsafe, self._changed.set)
        decoder = self._vocabulary.decoder(skips_special=request.params.skip_special_tokens)
        self._text = TextStream(request.params.stop_words, decoder)
        await asyncio.wrap_future(self._client.submit([request]))

    def _next_part(self) -> StreamPart | None:
        request = self._request
        assert request is not None, "it has been submitted"
        if request.record.done():
            return self._last_part(request.record.result())
        tokens: list[int] = []
        while request.updates:
            tokens += request.updates.popleft().generated_tokens
        if not tokens:
            return None
        self._seen += len(tokens)
        return StreamPart(self._text.feed(tokens), tuple(tokens), None)

    def _last_part(self, record: RequestRecord) -> StreamPart:
        self._is_over, self._record = True, record
        if record.status is not Status.COMPLETED:
            raise RequestFailed(record.error or f"request {record.request_id} was {record.status.name.lower()}")
        text, tokens = self._text.finish(record.generated_text), record.generated_tokens[self._seen :]
        return StreamPart(text, tokens, record.finish_reason)

    def _leave(self) -> None:
        self._is_over = True
        if self._request is not None and not self._request.record.done():
            self._client.abort([self._request])
