"""Asynchronous stream of a request's output."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from megatron_ext.engine.client import EngineClient
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.pausing import ABORT
from megatron_ext.errors import RequestFailed
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.token_versions import Runs, joined, part_of
from megatron_ext.text.detokenizer import TextStream
from megatron_ext.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class StreamPart:
    """Output of a request since the previous part.

    Concatenated, the texts are `RequestRecord.generated_text` and the tokens `RequestRecord.generated_tokens`.

    Attributes:
        text: Text that is final: incomplete characters and possible beginnings of stop words come with a later part. It
            may be empty.
        tokens: At least one token, except in the last part.
        finish_reason: "stop", "length" or "abort" (see `LoadedEngine.pause_generation`) in the last part, None before.
        weights_version: Versions of the weights that made the tokens; see `RequestRecord`.
        prefix_weights_version: Versions of the weights that computed what the tokens rest on; see `RequestRecord`.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    weights_version: Runs = ()
    prefix_weights_version: Runs = ()


class RequestStream(AsyncIterator[StreamPart]):
    """Stream of one request's parts, in any event loop, read by one task at a time; the first read submits it.

    The request is aborted when the reader stops: by leaving the loop (once nothing refers to the stream), by
    `aclose()`, or by cancellation of its task.

    Args:
        begin: Creates the request; called in a thread.
    """

    def __init__(self, begin: Callable[[], EngineRequest], client: EngineClient, vocabulary: Vocabulary) -> None:
        self._request: EngineRequest | None = None
        self._is_over = False
        self._begin = begin
        self._client = client
        self._vocabulary = vocabulary
        self._text = TextStream((), vocabulary.detokenize)
        self._seen = 0  # tokens
        self._changed = asyncio.Event()

    @property
    def record(self) -> RequestRecord | None:
        """Record of the request, once it has ended in any way: with the tokens and log-probs that it had then."""
        request = self._request
        if request is None or not request.record.done():
            return None
        failed = request.record.cancelled() or request.record.exception() is not None
        return request.partial if failed else request.record.result()

    async def __anext__(self) -> StreamPart:
        """Return the next part as soon as it is available.

        Raises:
            ConfigError: The prompt or the parameters are invalid.
            EngineSuspended: The engine is suspended.
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
        except BaseException:  # also if the task is cancelled
            self._leave()
            raise
        return part

    async def aclose(self) -> None:
        """Stop reading: the request is aborted unless it has ended; `record` keeps the tokens generated so far."""
        self._leave()
        request = self._request
        if request is None or request.record.done():
            return
        await asyncio.to_thread(self._client.abort, [request], at_once=True)
        if request.request is not None:  # the engine has taken it
            with contextlib.suppress(Exception):
                await asyncio.wrap_future(request.record)

    def __del__(self) -> None:
        self._leave()

    async def _submit(self) -> None:
        self._request = request = await asyncio.to_thread(self._begin)
        request.is_streamed = True
        # No reference to the stream itself, so that it is collected with its reader.
        request.notify = partial(asyncio.get_running_loop().call_soon_threadsafe, self._changed.set)
        decoder = self._vocabulary.decoder(skips_special=request.inputs.params.skip_special_tokens)
        self._text = TextStream(request.inputs.params.stop_words, decoder)
        await asyncio.wrap_future(self._client.submit([request]))

    def _next_part(self) -> StreamPart | None:
        request = self._request
        assert request is not None, "it has been submitted"
        if request.record.done():
            return self._last_part(request.record.result())
        tokens: list[int] = []
        versions: Runs = ()
        prefix_versions: Runs = ()
        while request.updates:
            update = request.updates.popleft()
            tokens += update.generated_tokens
            versions = joined(versions, update.weights_version)
            prefix_versions = joined(prefix_versions, update.prefix_weights_version)
        if not tokens:
            return None
        self._seen += len(tokens)
        return StreamPart(self._text.feed(tokens), tuple(tokens), None, versions, prefix_versions)

    def _last_part(self, record: RequestRecord) -> StreamPart:
        self._is_over = True
        if record.status is not Status.COMPLETED and record.finish_reason != ABORT:
            raise RequestFailed(record.error or f"request {record.request_id} was {record.status.name.lower()}")
        text, tokens = self._text.finish(record.generated_text), record.generated_tokens[self._seen :]
        runs = (record.weights_version, record.prefix_weights_version)
        versions = [part_of(one, self._seen, len(record.generated_tokens)) for one in runs]
        return StreamPart(text, tokens, record.finish_reason, *versions)

    def _leave(self) -> None:
        self._is_over = True
        if self._request is not None and not self._request.record.done():
            self._client.abort([self._request])
