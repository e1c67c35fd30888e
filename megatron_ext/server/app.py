"""The routes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

import megatron_ext
from megatron_ext.config import ServerConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.prefix_cache.shown import shown
from megatron_ext.server.access import AccessLog, note_answer
from megatron_ext.server.answers import ChatReply, CompletionReply, Reply, finished, whole
from megatron_ext.server.body import JsonRoute
from megatron_ext.server.chat import ChatFormat
from megatron_ext.server.engine_loop import EngineLoop
from megatron_ext.server.errors import install_error_handlers, unknown_model
from megatron_ext.server.gate import CALLER, KeyGate
from megatron_ext.server.history import History
from megatron_ext.server.keys import Keys, load_keys
from megatron_ext.server.metrics import Metrics
from megatron_ext.server.origins import OriginGate
from megatron_ext.server.page import PAGE, PAGE_HEADERS
from megatron_ext.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message
from megatron_ext.server.sampling import Job, PromptLimits, chat_jobs, check_count, completion_jobs
from megatron_ext.server.streaming import EventStream, events, unless_gone
from megatron_ext.server.texts import TextEncoder
from megatron_ext.text.tokenizer import Tokenizer

HOTTEST_PREFIXES = 20

router = APIRouter(route_class=JsonRoute)


@dataclass(eq=False)
class Serving:
    """What the routes need.

    Args:
        engine: Nobody else may touch it from now on, except for its tokenizer.
        model: The name it is served under.
        settings: Limits, and who is let in.
        keys: By default those that the settings name.
    """

    engine: InferenceEngine
    model: str
    settings: ServerConfig
    keys: Keys | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.keys = self.keys or load_keys(self.settings)
        self.metrics = Metrics(self.model)
        self.history = History(self.metrics)
        self.loop = EngineLoop(self.engine, self.metrics, self.settings.max_waiting_requests)
        self.tokenizer: Tokenizer = self.engine.controller.tokenizer
        self.vocabulary = self.engine.controller.vocabulary
        self.chat = ChatFormat(self.tokenizer, parse_control=self.settings.chat_control_tokens == "parse")
        geometry = self.engine.geometry
        longest = self.engine.context.max_sequence_length
        self.prompt_limits = PromptLimits(longest, geometry.blocks * geometry.block_size_tokens)
        self.texts = TextEncoder(self.tokenizer, self.engine.controller.tokenize_prompt, longest)

    async def tokenize_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation.

        Raises:
            ApiError: See `TextEncoder.encode`.
            ConfigError: See `ChatFormat.render`.
        """
        chat = await asyncio.to_thread(self.chat.render, messages)
        return await self.texts.encode(chat.text, lambda _: self.engine.controller.begin_once(chat.ids()))

    def check_model(self, body: GenerationRequest) -> None:
        """See that the request means this model.

        Raises:
            ApiError: It means another one.
        """
        if body.model is not None and body.model != self.model:
            raise unknown_model(body.model, self.model)

    def describe_server(self) -> dict[str, str]:
        """What the status page writes above everything."""
        return {"model": self.model, "version": megatron_ext.__version__}

    def describe(self) -> dict[str, object]:
        """OpenAI's model object."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "megatron_ext",
            "max_model_len": self.prompt_limits.sequence,
        }


def create_app(serving: Serving) -> FastAPI:
    """The application. Its lifespan starts and stops the engine's loop."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.loop.start()
        sampling = asyncio.create_task(serving.history.run())
        yield
        sampling.cancel()
        await serving.loop.stop()

    app = FastAPI(
        title="megatron_ext", version=megatron_ext.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.serving = serving
    app.include_router(router)
    install_error_handlers(app)
    keys = serving.keys
    assert keys is not None, "`__post_init__` has loaded them"
    app.add_middleware(KeyGate, keys=keys, hides_counts=serving.settings.hide_cache_counts)
    app.add_middleware(OriginGate, allowed_hosts=serving.settings.allowed_hosts, has_keys=keys.are_needed)
    if serving.settings.access_log:
        app.add_middleware(AccessLog)  # the last one added is the first to see a request
    return app


async def _serving(request: Request) -> Serving:  # without `async` FastAPI calls it in a thread
    return request.app.state.serving


ServerDependency = Annotated[Serving, Depends(_serving)]


@router.get("/v1/models")
async def list_models(serving: ServerDependency) -> dict[str, object]:
    """The one model."""
    return {"object": "list", "data": [serving.describe()]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, serving: ServerDependency) -> dict[str, object]:
    """The model by its name."""
    if model != serving.model:
        raise unknown_model(model, serving.model)
    return serving.describe()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, serving: ServerDependency) -> Response:
    """Go on with one or several prompts."""
    serving.check_model(body)
    choices = body.n or 1
    check_count(len(body.prompts), choices, serving.loop.capacity)
    prompts = [await serving.texts.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
    jobs = completion_jobs(body, prompts, serving.prompt_limits)
    echoes = None
    if body.echo:
        texts = [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(serving.vocabulary.detokenize, prompt)
            for prompt in body.prompts
        ]
        echoes = [text for text in texts for _ in range(choices)]
    reply = CompletionReply(
        serving.model, serving.vocabulary, choices, has_scores=body.logprobs is not None, echoes=echoes
    )
    return await _answer(request, serving, body, jobs, reply)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation."""
    serving.check_model(body)
    check_count(1, body.n or 1, serving.loop.capacity)
    prompt = await serving.tokenize_chat(body.messages)
    jobs = chat_jobs(body, prompt, serving.prompt_limits, serving.chat)
    reply = ChatReply(serving.model, serving.vocabulary, body.n or 1, has_scores=bool(body.logprobs))
    return await _answer(request, serving, body, jobs, reply)


async def _answer(
    request: Request, serving: Serving, body: GenerationRequest, jobs: list[Job], reply: Reply
) -> Response:
    """Run the jobs. A stream begins with the first token, so that what fails before has its status."""
    jobs = request.scope[CALLER].own(jobs)
    reply.shows_cache = not serving.settings.hide_cache_counts
    exchange = await serving.loop.submit(jobs, is_streamed=bool(body.stream))
    note_answer(request.state, reply, exchange)
    try:
        await unless_gone(request.receive, exchange.started() if body.stream else exchange.ended())
        ended = [handle for handle in exchange.handles if handle.record or handle.error]
        records = [finished(handle) for handle in ended]
    except BaseException:
        exchange.abort()
        raise
    if not body.stream:
        return _json(whole(reply, records))
    source = events(exchange, reply, serving.vocabulary.detokenize, with_usage=body.includes_usage)
    return EventStream(exchange, source)


def _json(content: object) -> Response:
    return Response(json.dumps(content, ensure_ascii=False, allow_nan=False).encode(), media_type="application/json")


@router.get("/health")
async def health(serving: ServerDependency) -> JSONResponse:
    """200 while the engine steps without failing."""
    is_healthy = serving.loop.is_healthy
    body = {"status": "ok" if is_healthy else "failing", "errors": serving.loop.error_count}
    return JSONResponse(body, 200 if is_healthy else 503)


@router.get("/metrics")
async def metrics(serving: ServerDependency) -> Response:
    """For Prometheus."""
    return Response(serving.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/metrics/history")
async def metrics_history(serving: ServerDependency, since: float = 0.0) -> dict[str, object]:
    """The last ten minutes of the metrics, or what came since then, and how it is now."""
    return serving.describe_server() | serving.history.since(since)


@router.get("/prefix_cache")
async def prefix_cache(serving: ServerDependency) -> dict[str, object]:
    """What the cache holds: sizes, use, and the hottest prefixes as digests. Never text."""
    return await serving.loop.call(_describe_cache, serving.engine)


def _describe_cache(engine: InferenceEngine) -> dict[str, object]:
    block_size = engine.geometry.block_size_tokens
    return {
        "geometry": dataclasses.asdict(engine.geometry),
        "occupancy": engine.prefix_cache_statistics(),
        "lost": engine.statistics().prefix_cache_lost(),
        "hottest_prefixes": [
            {"digest": shown(prefix.digest), "tokens": prefix.blocks * block_size, "hits": prefix.hits}
            for prefix in engine.hottest_prefixes(HOTTEST_PREFIXES)
        ],
    }


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(serving: ServerDependency) -> dict[str, object]:
    """Empty the cache; requests in flight go on, and leave nothing in it."""
    return {"occupancy": await serving.loop.reset_prefix_cache()}


@router.get("/", response_class=HTMLResponse)
async def status_page() -> HTMLResponse:
    """What the history and the cache's own route say, drawn."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)
