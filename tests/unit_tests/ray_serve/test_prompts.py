"""Prompts that a replica tokenizes for a router: those that its routes would compute."""

from __future__ import annotations

import json

import pytest

from megatron_ext.config import ServerConfig
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.ray_serve.forwarded import ANSWERED, ForwardedRequest, PromptRequest, ReadPrompt, respond
from megatron_ext.ray_serve.prompts import read_prompt
from megatron_ext.server.app import create_app
from megatron_ext.server.openai.protocol import ChatRequest, Message
from megatron_ext.server.serving import Serving
from megatron_ext.text.chat_template import ChatOptions
from tests.unit_tests.support.server import embedded_engine

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def serving() -> Serving:
    return Serving(LLMEngine(embedded_engine()), "embedded", ServerConfig(api_key="k"))


async def read(serving: Serving, path: str, authorization: bytes = b"Bearer k", **fields: object) -> ReadPrompt:
    return await read_prompt(serving, PromptRequest(path, authorization, json.dumps(fields).encode()))


async def test_prompts_are_those_that_the_routes_compute(serving: Serving):
    """RP-2: texts, ids and conversations become token ids; each prompt once, in order, however many choices it has."""
    text = await serving.text_encoder.encode("A list is")
    both = await read(serving, COMPLETION, prompt=["A list is", "A list is"], n=2, max_tokens=3)
    assert [list(one) for one in both.tokens] == [text, text]
    assert both.new_tokens == 12
    assert list((await read(serving, COMPLETION, prompt=[5, 6])).tokens[0]) == [5, 6]
    chat = await read(serving, CHAT, messages=MESSAGES, max_tokens=3, enable_prefix_caching=False)
    assert list(chat.tokens[0]) == (await read_chat(serving))
    assert not chat.is_shared
    assert both.is_shared


async def read_chat(serving: Serving) -> list[int]:
    body = ChatRequest.model_validate({"messages": MESSAGES})
    return (await serving.read_chat(await serving.conversation(body.messages, body.chat_options, None))).ids


async def test_salts_are_bound_to_the_caller(serving: Serving):
    """RP-2: equal prompts of two keys are two prompts, as in the replica's cache."""
    caller = serving.keys.caller(b"k")
    assert (await read(serving, COMPLETION, prompt="x")).salt == caller.bind(None)
    assert (await read(serving, COMPLETION, prompt="x", cache_salt="s")).salt == caller.bind("s")


async def test_keys_of_answers_are_bound_to_the_caller(serving: Serving):
    """SA-15: a conversation with answers is tokenized once the router has looked for them; marks come with it."""
    chat = [*MESSAGES, {"role": "assistant", "content": "Rows."}, {"role": "user", "content": "More."}]
    for salt in (None, "s"):
        first = await read(serving, CHAT, messages=chat, cache_salt=salt)
        assert not first.tokens
        scope = serving.keys.caller(b"k").bind(salt)
        conversation = await serving.conversation([Message(**one) for one in chat], ChatOptions(), scope)
        assert first.keys == tuple(conversation.places.values())
    marked = [{**one, "cache_control": {"type": "ephemeral"}} for one in chat]
    body = json.dumps({"messages": marked}).encode()
    found = await read_prompt(serving, PromptRequest(CHAT, b"Bearer k", body, known={}))
    parsed = ChatRequest.model_validate_json(body)
    assert len(found.chat.marks) == 3
    assert found.chat.marks == await serving.marked_positions(parsed, found.chat.ids)


@pytest.mark.parametrize(
    ("path", "authorization", "fields"),
    [
        (COMPLETION, b"Bearer wrong", {"prompt": "x"}),
        (COMPLETION, b"", {"prompt": "x"}),
        (COMPLETION, b"Bearer k", {"prompt": 3}),
        (COMPLETION, b"Bearer k", {"prompt": [2**40]}),
        (COMPLETION, b"Bearer k", {"prompt": "x", "max_tokens": 10**6}),
        (CHAT, b"Bearer k", {"messages": []}),
        (CHAT, b"Bearer k", {}),
    ],
)
async def test_nothing_is_tokenized_of_a_request_that_is_refused(
    serving: Serving, path: str, authorization: bytes, fields: dict[str, object]
):
    """RP-4: the route reports the mistake, so the router has none to report."""
    assert await read(serving, path, authorization, **fields) == ReadPrompt()


async def test_tokens_that_were_handed_on_are_computed(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    """RP-2: a replica does not tokenize again what it, or another one, has tokenized for the router."""
    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer k"), (b"host", b"127.0.0.1")]
    requests = []
    for path, fields in ((COMPLETION, {"prompt": "A list is"}), (CHAT, {"messages": MESSAGES})):
        body = json.dumps({**fields, "max_tokens": 2, "temperature": 0}).encode()
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        requests.append(
            ForwardedRequest.of(scope, body, await read_prompt(serving, PromptRequest(path, b"Bearer k", body)))
        )

    async def refuse(*arguments: object) -> list[int]:
        raise AssertionError("it is tokenized again")

    monkeypatch.setattr(serving.text_encoder, "run", refuse)
    app = create_app(serving)
    async with app.router.lifespan_context(app):
        for request in requests:
            messages = [message async for message in respond(app, request)]
            head, *parts = [message for message in messages if message["type"] != ANSWERED]
            assert head["status"] == 200
            answer = json.loads(b"".join(part["body"] for part in parts))
            assert answer["usage"]["prompt_tokens"] == len(request.prompt.tokens[0])
