"""The Messages API through a coordinator: routed by its prompt, counted, retried, and with its errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from megatron_ext.config import ServerConfig
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.server import access
from megatron_ext.server.serving import Serving
from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.fleet import FakeReplica, breaks_off, coordinator, error, fleet
from tests.unit_tests.support.messages import (
    COUNT,
    MESSAGES,
    check_envelope,
    checked,
    contents,
    events_of,
    prompt_tokens,
    summed,
)
from tests.unit_tests.support.server import LiveServer, embedded_engine

QUESTION = "Where should Ada go tomorrow, to Oslo or to Rome, and what should she take with her?"
BODY = {"messages": contents(QUESTION), "max_tokens": 8, "temperature": 0}


@contextlib.asynccontextmanager
async def live(**settings: object):
    """Two real replicas, each in a thread, and a coordinator."""
    configs = [
        ServerConfig(shutdown_timeout=5.0, served_model_name=("embedded", "claude"), **settings) for _ in range(2)
    ]
    replicas = [LiveServer(Serving(embedded_engine(), "embedded", one)) for one in configs]
    try:
        async with coordinator(*replicas, replica_timeout=60.0) as front:
            yield front, replicas
    finally:
        for replica in replicas:
            await asyncio.to_thread(replica.stop)


async def test_each_conversation_stays_with_its_replica(caplog):
    """RP-2: the second turn skips the first one's blocks, whole and streamed, by either name; the log says so."""
    caplog.set_level(logging.INFO, access.__name__)
    async with live() as (front, _):
        for name in ("Ada", "Bob"):
            first = {**BODY, "messages": contents(f"{name}: {QUESTION}"), "model": "claude"}
            answer = await front.http.post(MESSAGES, json=first)
            message = checked(answer.json())
            assert (message["model"], message["usage"]["cache_read_input_tokens"]) == ("claude", 0)
            turn = [*first["messages"], {"role": "assistant", "content": message["content"]}, *contents("And then?")]
            count = await front.http.post(COUNT, json={"messages": turn, "model": "claude"})
            for stream in (False, True):
                answer = await front.http.post(MESSAGES, json=first | {"messages": turn, "stream": stream})
                second = checked(summed(answer.text) if stream else answer.json())
                assert second["usage"]["cache_read_input_tokens"] >= prompt_tokens(message) // 16 * 16
                assert count.json() == {"input_tokens": prompt_tokens(second)}
                assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert [one["id"] for one in (await front.http.get("/v1/models")).json()["data"]] == ["embedded", "claude"]
        await front.check_idle()


async def test_a_prompt_is_tokenized_as_its_chat():
    """RP-2: a replica is asked for the tokens of the chat that is answered; the key is handed on as a bearer's."""
    async with fleet() as (front, fakes):
        tool = {"name": "f", "input_schema": {"type": "object"}}
        body = {**BODY, "system": "Be kind.", "tools": [tool], "thinking": {"type": "disabled"}}
        answer = await front.http.post(MESSAGES, json=body, headers={"x-api-key": "k"})
        assert answer.status_code == 200
        (asked,) = [one for fake in fakes for one in fake.others if one.path == "/tokenize"]
        assert [one["role"] for one in asked.body["messages"]] == ["system", "user"]
        assert asked.body["tools"][0]["function"]["parameters"] == {"type": "object"}
        assert asked.body["chat_template_kwargs"] == {"enable_thinking": False}
        (sent,) = [one for fake in fakes for one in fake.requests]
        assert sent.body == body
        assert {one.headers["authorization"] for one in (asked, sent)} == {"Bearer k"}


async def test_a_wrong_body_is_the_replicas_to_refuse():
    async with fleet() as (front, fakes):
        fakes[0].behave = fakes[1].behave = error(400)
        image = {"role": "user", "content": [{"type": "image"}]}
        answer = await front.http.post(MESSAGES, json=BODY | {"messages": [image]})
        check_envelope(answer, 400, "invalid_request_error")
        assert not [one for fake in fakes for one in fake.others if one.path == "/tokenize"]


async def test_errors_of_the_coordinator():
    """RP-4: they have Anthropic's envelope, and the id of the request."""
    async with fleet(1) as (front, fakes):
        check_envelope(await front.http.post(MESSAGES, json=BODY | {"model": "x"}), 404, "not_found_error")
        check_envelope(await front.http.get(MESSAGES), 405, "invalid_request_error")
        check_envelope(await front.http.post(MESSAGES, content=b"{}"), 415, "invalid_request_error")
        fakes[0].behave = error(429, retry_after="3")
        full = await front.http.post(MESSAGES, json=BODY)
        check_envelope(full, 429, "rate_limit_error")
        assert full.headers["retry-after"] == "3"
        check_error(await front.http.post("/v1/chat/completions", content=b"{}"), 415)


@pytest.mark.parametrize("code", ["request_aborted", "request_failed"])
async def test_what_another_replica_would_fail_as_well_is_not_sent_to_it(code):
    """RP-4: the code says so, in Anthropic's envelope, too."""

    async def fails(fake: FakeReplica, exchange) -> None:
        named = {"type": "api_error", "message": "m", "code": code}
        exchange.answer({"type": "error", "error": named, "request_id": "r"}, 500)

    async with fleet() as (front, fakes):
        for fake in fakes:
            fake.behave = fails
        answer = await front.http.post(MESSAGES, json=BODY)
        assert (answer.status_code, answer.json()["request_id"]) == (500, "r")
        assert sum(len(fake.requests) for fake in fakes) == 1


async def test_a_stream_that_breaks_off_ends_with_an_error():
    """RP-4: the last event is one that Anthropic's clients know."""
    async with fleet(1) as (front, fakes):
        fakes[0].behave = breaks_off(1)
        answer = await front.http.post(MESSAGES, json=BODY | {"stream": True})
        last = events_of(answer.text.removeprefix('data: {"n": 0}\n\n'))[-1]
        assert (last["type"], last["error"]["code"]) == ("error", "replica_lost")
        assert last["request_id"] == answer.headers["request-id"]
        fakes[0].requests.clear()


async def test_other_names_lead_to_their_group():
    """RP-9: a model's other names are part of its group; one that has others is another group's."""
    named = {"one": ["small", "both"], "two": ["large", "both"], "three": ["tiny"]}
    fakes = [
        FakeReplica(name=name, beat={"model": name, "aliases": aliases, "root": f"/models/{name}"})
        for name, aliases in named.items()
    ]
    one, two, three = [await fake.start() for fake in fakes]
    three.beat["model"] = "one"
    try:
        async with coordinator(one, two, model=("one", "two")) as front:
            front.coordination.fleet.add(three.url, front.coordination.fleet.members[one.url].source)
            await front.until(three, Status.REFUSED)
            for name, fake in (("small", one), ("large", two), ("both", one), ("two", two), ("/models/two", two)):
                assert (await front.complete(model=name)).json()["by"] == fake.name
            error = check_error(await front.complete(model="medium"), 404)
            assert all(name in error["message"] for name in ("'one'", "'small'", "'large'"))
    finally:
        for fake in (one, two, three):
            await fake.stop()
