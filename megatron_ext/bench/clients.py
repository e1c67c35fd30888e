"""Clients of an engine in this process, or of a server of OpenAI's API anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

PATIENCE = 600.0  # seconds for one answer


@dataclass
class PendingOutput:
    """Output of one request. Times are seconds of `time.perf_counter`."""

    kind: str
    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each part of the answer
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None if the server does not say
    generated_tokens: int = 0
    error: str | None = None


class Client(Protocol):
    """Client that requests one answer at a time; several tasks may use it at once."""

    name: str

    async def ask(self, prompt: str, count: int, answer: PendingOutput) -> None:
        """Request a greedy continuation of `count` tokens, and record its parts with their times.

        Raises:
            AskError: The answer failed or is incomplete.
        """

    async def close(self) -> None:
        """Close the client."""


class AskError(Exception):
    """Error of a request, in a line."""


class HttpClient:
    """Client that streams completions from a server.

    Args:
        url: With or without `/v1` at its end.
        model: Default: the first one that the server lists.
        key: Sent as a bearer's, if there is one.
        extra: Fields for every body, such as `{"ignore_eos": true}` for servers that know it.
    """

    def __init__(self, url: str, model: str | None, key: str | None, extra: Mapping[str, object]) -> None:
        import httpx

        self.name = self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=PATIENCE, limits=limits)
        self._model = model
        self._extra = extra

    async def ask(self, prompt: str, count: int, answer: PendingOutput) -> None:
        """See the method of `Client`."""
        import httpx

        try:
            body = {
                "model": await self._served(),
                "prompt": prompt,
                "max_tokens": count,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extra,
            }
            answer.started = time.perf_counter()
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise AskError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
                async for line in response.aiter_lines():
                    _take_line(line, answer)
        except httpx.HTTPError as error:
            raise AskError(f"{type(error).__name__}: {error}") from error
        if not answer.generated_tokens:
            raise AskError("the stream ended without its usage (stream_options.include_usage)")

    async def _served(self) -> str:
        if self._model is None:
            listed = await self._http.get("/v1/models")
            if listed.status_code != 200:
                raise AskError(f"/v1/models: {listed.status_code}: {listed.text[:300]}")
            self._model = str(listed.json()["data"][0]["id"])
        return self._model

    async def close(self) -> None:
        """See the method of `Client`."""
        await self._http.aclose()


def _take_line(line: str, answer: PendingOutput) -> None:
    """Record a line of server-sent events."""
    content = line.removeprefix("data:").strip()
    if not line.startswith("data:") or content == "[DONE]":
        return
    event = json.loads(content)
    if "error" in event:
        raise AskError(str(event["error"])[:300])
    for choice in event.get("choices") or ():
        if choice.get("text"):
            answer.arrivals.append(time.perf_counter())
            answer.text += choice["text"]
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.generated_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


class EngineClient:
    """Client of an engine of this package, which is loaded in this process.

    Args:
        settings: Settings of `load_engine`.
        ignore_eos: True if answers go on after the end of a document.
    """

    def __init__(self, settings: Mapping[str, object], *, ignore_eos: bool) -> None:
        from megatron_ext import load_engine

        self._engine = load_engine(**settings)  # type: ignore[arg-type]  # it checks them
        self._ignore_eos = ignore_eos
        self.name = self._engine.model_name

    async def ask(self, prompt: str, count: int, answer: PendingOutput) -> None:
        """See the method of `Client`."""
        from megatron_ext import RequestFailed, RequestParams

        params = RequestParams(num_tokens_to_generate=count, ignore_eos=self._ignore_eos)
        answer.started = time.perf_counter()
        stream = self._engine.stream(prompt, params)
        try:
            async for part in stream:
                if part.text:
                    answer.arrivals.append(time.perf_counter())
                    answer.text += part.text
        except (RequestFailed, ValueError) as error:
            raise AskError(str(error)[:300]) from error
        record = stream.record
        assert record is not None, "the stream has come to its end"
        answer.prompt_tokens = record.prompt_token_count
        answer.cached_tokens = record.skipped_prefill_token_count
        answer.generated_tokens = len(record.generated_tokens)

    async def close(self) -> None:
        """See the method of `Client`."""
        await asyncio.to_thread(self._engine.close)


@contextlib.asynccontextmanager
async def closing(client: Client) -> AsyncIterator[Client]:
    """Close the client at the end of this context."""
    try:
        yield client
    finally:
        await client.close()
