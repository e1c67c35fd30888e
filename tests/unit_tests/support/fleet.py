"""Replicas behind an ingress in this process, without Ray: what crosses processes is pickled."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import TypeVar

import httpx
from starlette.types import Message

from megatron_ext.ray_serve.forwarded import ForwardedRequest, IngressApp, PromptRequest, ReadPrompt, respond
from megatron_ext.ray_serve.prompts import read_prompt
from megatron_ext.server.anthropic.error_envelope import AnthropicMiddleware
from megatron_ext.server.app import create_app
from megatron_ext.server.openai.chat_prompt import AnswerMemory
from megatron_ext.server.serving import Serving
from tests.unit_tests.support.holding import PATIENCE

Value = TypeVar("Value")


def across(value: Value) -> Value:
    """Return a value as another process gets it."""
    return pickle.loads(pickle.dumps(value))


class Fleet:
    """Ingress with two replicas: one reads all prompts, the other answers; what a response continues is read there.

    Args:
        reader: Replica that reads prompts.
        serving: Replica that answers.
    """

    def __init__(self, reader: Serving, serving: Serving) -> None:
        self.reader, self.serving = reader, serving
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._resources = AsyncExitStack()
        self._run(self._start())
        self.http = self

    async def _start(self) -> None:
        self._app = create_app(self.serving)
        for app in (self._app, create_app(self.reader)):
            await self._resources.enter_async_context(app.router.lifespan_context(app))
        self.restart()

    def restart(self) -> None:
        """Begin with another ingress."""
        self.answers = AnswerMemory(self.serving.settings.limits.answers_bytes)
        app = AnthropicMiddleware(IngressApp(self._read, self._forward, 2**24, self.answers))
        transport = httpx.ASGITransport(app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=PATIENCE)

    async def _read(self, request: PromptRequest) -> ReadPrompt:
        return across(await read_prompt(self.reader if request.owner is None else self.serving, across(request)))

    async def _forward(self, request: ForwardedRequest) -> AsyncIterator[Message]:
        async for message in respond(self._app, across(request)):
            yield across(message)

    def _run(self, work: Coroutine[object, object, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def post(self, path: str, **options: object) -> httpx.Response:
        return self._run(self._client.post(path, **options))

    def reset_cache(self) -> None:
        self.serving.requests.client.call(self.serving.engine.inference_engine.reset_prefix_cache).result(PATIENCE)

    def stop(self) -> None:
        self._run(self._resources.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
