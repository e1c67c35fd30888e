"""The routes that generate."""

from __future__ import annotations

import asyncio
import json

from fastapi import APIRouter, Request
from starlette.responses import Response

from megatron_ext.server.access import note_answer
from megatron_ext.server.answers import Reply, finished, whole
from megatron_ext.server.body import JsonRoute
from megatron_ext.server.fields import GenerationRequest
from megatron_ext.server.gate import CALLER
from megatron_ext.server.protocol import ChatRequest, CompletionRequest
from megatron_ext.server.replies import ChatReply, CompletionReply
from megatron_ext.server.sampling import Job, chat_jobs, check_count, completion_jobs
from megatron_ext.server.serving import ServerDependency, Serving
from megatron_ext.server.streaming import EventStream, Wanted, events, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, serving: ServerDependency) -> Response:
    """Go on with one or several prompts."""
    serving.check_model(body)
    choices = body.n or 1
    check_count(len(body.prompts), choices, serving.requests.capacity)
    await serving.forms.check(body.form)
    prompts = [await serving.texts.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts]
    jobs = completion_jobs(body, prompts, serving.prompt_limits, serving.defaults)
    echoes = None
    if body.echo:
        texts = [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(serving.vocabulary.detokenize, prompt)
            for prompt in body.prompts
        ]
        echoes = [text for text in texts for _ in range(choices)]
    reply = CompletionReply(
        serving.model,
        serving.vocabulary,
        choices,
        has_scores=body.logprobs is not None,
        echoes=echoes,
        shows_ids=bool(body.return_token_ids),
    )
    return await _answer(request, serving, body, jobs, reply)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation."""
    serving.check_model(body)
    check_count(1, body.n or 1, serving.requests.capacity)
    await serving.forms.check(body.form)
    prompt = await serving.tokenize_chat(body.messages, body.chat_options)
    jobs = chat_jobs(body, prompt, serving.prompt_limits, serving.chat, serving.defaults)
    reply = ChatReply(
        serving.model,
        serving.vocabulary,
        body.n or 1,
        has_scores=bool(body.logprobs),
        shows_ids=bool(body.return_token_ids),
        most_calls=body.most_calls,
    )
    return await _answer(request, serving, body, jobs, reply)


async def _answer(
    request: Request, serving: Serving, body: GenerationRequest, jobs: list[Job], reply: Reply
) -> Response:
    """Run the jobs. A stream begins with the first token, so that what fails before has its status."""
    jobs = request.scope[CALLER].own(jobs)
    reply.shows_cache = not serving.settings.hide_cache_counts
    if body.explain_prefix_cache:
        reply.explains = serving.explains_to(request.scope[CALLER])
    exchange = await serving.requests.submit(jobs, is_streamed=bool(body.stream))
    note_answer(request.state, reply, exchange)
    serving.answers[reply.id] = exchange
    try:
        await unless_gone(request.receive, exchange.started() if body.stream else exchange.ended())
        ended = [handle for handle in exchange.handles if handle.record or handle.error]
        records = [finished(handle) for handle in ended]
    except BaseException:
        exchange.abort()
        raise
    if not body.stream:
        return _json(whole(reply, records))
    wanted = Wanted(serving.decoder, body.includes_usage, body.continues_usage)
    return EventStream(exchange, events(exchange, reply, wanted))


def _json(content: object) -> Response:
    return Response(json.dumps(content, ensure_ascii=False, allow_nan=False).encode(), media_type="application/json")
