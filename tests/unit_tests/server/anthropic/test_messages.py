"""SA-13: Anthropic's Messages API: its answers are those of the same chat in other words, whole and streamed."""

from __future__ import annotations

import itertools
import json
import threading

import pytest

from megatron_ext.server.anthropic.message_fields import MessagesRequest, as_chat
from megatron_ext.server.openai import request_fields
from tests.on_request import long_except
from tests.unit_tests.server.openai.test_reasoning import ANSWER, THINKING
from tests.unit_tests.server.test_errors import CHAT
from tests.unit_tests.support.agent_loop import TOOLS, run
from tests.unit_tests.support.messages import (
    COUNT,
    MESSAGES,
    check_envelope,
    contents,
    create,
    events_of,
    prompt_tokens,
    text_of,
    without_ids,
)
from tests.unit_tests.support.server import PATIENCE, LiveServer, embedded_engine

BLOCK = 16
SYSTEM = "You plan journeys. Look up the weather, and take notes of what matters to the traveller."
QUESTION = "Where should Ada go tomorrow, to Oslo or to Rome, and what should she take with her?"
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
FUNCTIONS = [
    {
        "name": one["function"]["name"],
        "strict": True,
        "input_schema": one["function"]["parameters"],
        "description": "",
    }
    for one in TOOLS
]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LOOKUP = {"type": "tool_use", "name": "lookup", "input": {"city": "Oslo", "days": 3}}


@pytest.fixture
def says(prescribe, monkeypatch):
    """A function: from now on every answer of a server is this text; it returns the server."""

    def say(server: LiveServer, text: str) -> LiveServer:
        prescribe(server, text)
        monkeypatch.setattr(server.serving, "defaults", {**server.serving.defaults, "presence_penalty": 0.1})
        return server

    return say


def chat(server: LiveServer, **fields: object) -> dict:
    body = {"model": "embedded", "max_tokens": 24, "temperature": 0} | fields
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def in_chat_words(message: dict) -> tuple:
    """Text, calls, end and counts of a message, in the words of chats."""
    usage = message["usage"]
    calls = [(one["name"], one["input"]) for one in message["content"] if one["type"] == "tool_use"]
    reason = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    ended = reason[message["stop_reason"]]
    return (
        text_of(message),
        calls,
        ended,
        prompt_tokens(message),
        usage["cache_read_input_tokens"],
        usage["output_tokens"],
    )


def of_chat(answer: dict) -> tuple:
    """Text, calls, end and counts of a chat's answer."""
    (choice,), usage = answer["choices"], answer["usage"]
    calls = [
        (one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in choice["message"].get("tool_calls", ())
    ]
    counts = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    return choice["message"]["content"] or "", calls, choice["finish_reason"], *counts


@BOTH
class TestEqualToChats:
    """Text, tokens and cached tokens are those of chat completions for the same conversation."""

    def test_conversations(self, embedded, stream):
        turns = contents(QUESTION, "To Rome, I think.", "Why not to Oslo?")
        parts = [{"type": "text", "text": SYSTEM[:20]}, {"type": "text", "text": SYSTEM[20:]}]
        blocks = [*turns[:2], {"role": "user", "content": [{"type": "text", "text": turns[2]["content"]}]}]
        expected = []
        embedded.reset_cache()
        for fields in ({}, {"top_p": 0.5, "seed": 3, "temperature": 0.8}, {"max_tokens": 1}):
            messages = [{"role": "system", "content": SYSTEM}, *turns]
            expected.append(of_chat(chat(embedded, messages=messages, **fields)))
        for system, messages in ((SYSTEM, turns), (parts, blocks)):
            embedded.reset_cache()
            found = [
                in_chat_words(create(embedded, stream=stream, system=system, messages=messages, **fields))
                for fields in ({}, {"top_p": 0.5, "seed": 3, "temperature": 0.8}, {"max_tokens": 1})
            ]
            assert found == expected
        assert expected[1][4] > 0, "the second request hits the first one"

    def test_the_next_turn_skips_the_answer(self, trained, stream):
        """All whole blocks of the prompt and of the answer before, which comes back as blocks."""
        trained.reset_cache()
        first = create(trained, stream=stream, system=SYSTEM, messages=contents(QUESTION), max_tokens=40)
        assert first["usage"]["cache_read_input_tokens"] == 0
        assert first["usage"]["cache_creation_input_tokens"] == prompt_tokens(first) // BLOCK * BLOCK
        turn = [*contents(QUESTION), {"role": "assistant", "content": first["content"]}, *contents("And then?")]
        second = create(trained, stream=stream, system=SYSTEM, messages=turn)
        known = prompt_tokens(first) + first["usage"]["output_tokens"] - 1
        assert second["usage"]["cache_read_input_tokens"] == known // BLOCK * BLOCK


class TestTools:
    """Calls become blocks, and results come back; all of it as in a chat."""

    def play(self, server: LiveServer, *, stream: bool) -> tuple[list[tuple], list[dict]]:
        """A loop of an agent with prescribed choices; return its answers in common words, and the conversation."""
        choices = [
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "clock", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "lookup", "disable_parallel_tool_use": True},
            {"type": "none"},
        ]
        messages, found = contents(QUESTION), []
        for number, choice in enumerate(choices):
            answer = create(
                server,
                stream=stream,
                system=SYSTEM,
                tools=FUNCTIONS,
                tool_choice=choice,
                messages=messages,
                max_tokens=80,
            )
            found.append(in_chat_words(answer))
            if choice["type"] == "none":
                assert answer["stop_reason"] in ("end_turn", "max_tokens")
                break
            assert answer["stop_reason"] == "tool_use"
            (call,) = [one for one in answer["content"] if one["type"] == "tool_use"]
            result = run(call["name"], call["input"], fails=False)
            given = result if number else [{"type": "text", "text": result}]
            block = {"type": "tool_result", "tool_use_id": call["id"], "content": given}
            messages = [*messages, {"role": "assistant", "content": answer["content"]}]
            messages.append({"role": "user", "content": [block, {"type": "text", "text": "Go on."}]})
        return found, messages

    @pytest.mark.parametrize("stream", long_except([True], [False, True]), ids=["whole", "streamed"])
    def test_a_loop(self, trained, stream):
        """Each answer and each count is that of the chat, whose conversation is written here in its own words."""
        trained.reset_cache()
        found, _ = self.play(trained, stream=stream)
        trained.reset_cache()
        messages = [{"role": "system", "content": SYSTEM}, *contents(QUESTION)]
        named = [{"type": "function", "function": {"name": name}} for name in ("clock", "lookup")]
        expected = []
        tools = [{**one, "function": {**one["function"], "description": ""}} for one in TOOLS]
        for choice in ("required", *named, "none"):
            answer = chat(
                trained, messages=messages, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=80
            )
            expected.append(of_chat(answer))
            message = answer["choices"][0]["message"]
            if choice == "none":
                break
            (call,) = message["tool_calls"]
            result = run(call["function"]["name"], json.loads(call["function"]["arguments"]), fails=False)
            messages = [*messages, {"role": "assistant", "content": message["content"], "tool_calls": [call]}]
            messages += [{"role": "tool", "content": result, "tool_call_id": call["id"]}, *contents("Go on.")]
        assert found == expected
        assert all(one[4] > 0 for one in found[1:]), "each turn skips what the one before has computed"

    @BOTH
    def test_texts_between_calls_keep_their_place(self, embedded, says, stream):
        server = says(embedded, f"First.\n{CALL}\nThen the time.\n{OTHER}")
        answer = create(server, stream=stream, messages=contents(QUESTION), tools=FUNCTIONS, max_tokens=120)
        assert without_ids(answer)["content"] == [
            {"type": "text", "text": "First."},
            LOOKUP,
            {"type": "text", "text": "Then the time."},
            {"type": "tool_use", "name": "clock", "input": {}},
        ]
        assert answer["stop_reason"] == "tool_use"

    def test_a_result_that_is_an_error_says_so(self, embedded):
        """Marks and the kind of content change nothing; an error does."""

        def count(**fields: object) -> int:
            call = {"type": "tool_use", "id": "toolu_1", "name": "clock", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
            turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
            return counted(embedded, messages=[*contents(QUESTION), *turns], tools=FUNCTIONS)

        mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        parts = [{"type": "text", "text": "no "}, {"type": "text", "text": "answer", **mark}]
        assert count(content="no answer") == count(content=parts, **mark)
        assert count(content="no answer", is_error=True) > count(content="no answer")
        assert count() == count(content=[]) == count(content="")


class TestThinking:
    """Thinking is a block, which comes back; its budget and its switch are those of chats."""

    @BOTH
    def test_a_block_of_its_own(self, thinker, says, stream):
        server = says(thinker, f"<think>\n{THINKING}\n</think>\n\n{ANSWER}")
        answer = create(server, stream=stream, messages=contents(QUESTION), max_tokens=200)
        thinking, text = answer["content"]
        assert thinking.pop("signature")
        assert thinking == {"type": "thinking", "thinking": THINKING}
        assert text == {"type": "text", "text": ANSWER}
        assert answer["stop_reason"] == "end_turn"
        reasoning = chat(server, messages=contents(QUESTION), max_tokens=200)["usage"]["completion_tokens_details"]
        assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": reasoning["reasoning_tokens"]}

    def test_comes_back_to_the_template(self, thinker):
        call = {"id": "toolu_1", "name": "clock", "input": {}}
        blocks = [
            {"type": "thinking", "thinking": THINKING, "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", **call},
        ]
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}
        turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        called = {"id": "toolu_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        spoken = [
            *contents(QUESTION),
            {"role": "assistant", "reasoning_content": THINKING, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "noon"},
        ]
        asked = {"messages": spoken, "tools": TOOLS}
        tools = [{name: value for name, value in one.items() if name != "description"} for one in FUNCTIONS]
        assert (
            counted(thinker, messages=[*contents(QUESTION), *turns], tools=tools)
            == thinker.http.post("/tokenize", json=asked).json()["count"]
        )


def counted(server: LiveServer, **fields: object) -> int:
    answer = server.http.post(COUNT, json={"model": "embedded"} | fields)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"input_tokens"}
    return answer.json()["input_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": SYSTEM},
        {"system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]},
        {"tools": FUNCTIONS, "tool_choice": {"type": "auto"}},
        {"messages": contents(QUESTION, "To", "Where?")},
        {"messages": contents(QUESTION, "To Rome")},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    ids=str,
)
def test_counted_tokens_are_those_of_the_request(embedded, fields):
    """Count_tokens equals what a request then uses, and cached tokens do not change it."""
    fields = {"messages": contents(QUESTION)} | fields
    assert counted(embedded, **fields) == prompt_tokens(create(embedded, **fields, max_tokens=1))
    assert counted(embedded, **fields) == prompt_tokens(create(embedded, **fields, max_tokens=1))


@BOTH
class TestEnds:
    def test_a_stop_sequence_is_named(self, embedded, says, stream):
        server = says(embedded, "One, two, three, four.")
        fields = {"stream": stream, "messages": contents(QUESTION)}
        answer = create(server, stop_sequences=["five", "three"], **fields)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "three")
        assert text_of(answer) == "One, two, "
        assert create(server, stop_sequences=["five"], **fields)["stop_reason"] == "end_turn"
        assert create(server, max_tokens=3, **fields)["stop_reason"] == "max_tokens"


def test_streams_equal_whole_answers(thinker, says):
    """Thinking, text, calls and usage; only random ids differ."""
    server = says(thinker, f"<think>\n{THINKING}\n</think>\n\nFirst.\n{CALL}\nThen.\n{OTHER}")
    fields = {"messages": contents(QUESTION), "tools": FUNCTIONS, "max_tokens": 200}
    create(server, **fields | {"max_tokens": 1})  # the other two are hits
    whole, streamed = (without_ids(create(server, stream=stream, **fields)) for stream in (False, True))
    assert whole == streamed
    assert [one["type"] for one in whole["content"]] == ["thinking", "text", "tool_use", "text", "tool_use"]


class TestCounts:
    def test_hidden(self, serve):
        """SE-3: with --hide-cache-counts all tokens are input tokens."""
        server = serve(embedded_engine(), "embedded", hide_cache_counts=True)
        for stream in (False, False, True):
            usage = create(server, stream=stream, messages=contents(QUESTION))["usage"]
            assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)
            assert usage["input_tokens"] == counted(server, messages=contents(QUESTION)) > BLOCK


ASKED = {"messages": contents(QUESTION), "max_tokens": 8}
CALLED = [{"type": "tool_use", "id": "t", "name": "clock", "input": {}}]
REFUSED = [
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "0.content: has a block of type 'image'"),
    ({"messages": [{"role": "user", "content": CALLED}]}, "has role 'user', and a block of type 'tool_use'"),
    ({"messages": [*contents(QUESTION), {"role": "assistant", "content": CALLED}]}, "and no tool_result follows"),
    ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "'web_search_20250305', which only Anthropic's"),
    ({"tool_choice": {"type": "tool"}}, "needs the name of one"),
    ({"thinking": {"type": "enabled"}}, "needs budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "must be greater than thinking.budget_tokens 8"),
]


class TestErrors:
    """Errors have Anthropic's envelope, whatever part of the server has found them."""

    @pytest.mark.parametrize("path", [MESSAGES, COUNT])
    def test_a_prompt_that_is_too_long(self, embedded, path):
        body = {"messages": contents("a " * 5000), "model": "embedded"} | (
            {"max_tokens": 1} if path == MESSAGES else {}
        )
        limit = embedded.serving.limits.max_model_len
        answer = embedded.http.post(path, json=body)
        if path == COUNT:
            assert answer.json()["input_tokens"] > limit
            return
        error = check_envelope(answer, 400, "invalid_request_error")
        count = counted(embedded, messages=body["messages"])
        assert error["message"] == f"prompt is too long: {count} tokens > {limit} maximum"
        longest = embedded.serving.tokenizer.longest_token
        body["messages"] = contents("a" * (limit * longest + 1))
        error = check_envelope(embedded.http.post(path, json=body), 400, "invalid_request_error")
        assert error["message"].startswith("prompt is too long: ")

    @pytest.mark.parametrize(("fields", "named"), REFUSED)
    def test_refused(self, embedded, fields, named):
        error = check_envelope(embedded.http.post(MESSAGES, json=ASKED | fields), 400, "invalid_request_error")
        assert named in error["message"]

    @pytest.mark.parametrize("path", [MESSAGES, COUNT])
    @pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
    def test_threads(self, embedded, path, thread):
        """The SDK's tool runner keeps conversations in threads; it sends whole ones after an error with this code."""
        for other in ({}, {"messages": []}):
            answer = embedded.http.post(path, json=ASKED | other | {"thread": thread})
            error = check_envelope(answer, 400, "invalid_request_error")
            assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert embedded.http.post(path, json=ASKED | {"thread": None}).status_code == 200

    def test_other_statuses(self, serve):
        server = serve(embedded_engine(), "embedded", api_key="k")
        key = {"x-api-key": "k"}
        assert server.serving.settings.limits.body_bytes < 1 << 24
        for status, kind, answer in (
            (401, "authentication_error", server.http.post(MESSAGES, json=ASKED)),
            (404, "not_found_error", server.http.post(MESSAGES, json=ASKED | {"model": "x"}, headers=key)),
            (405, "invalid_request_error", server.http.get(MESSAGES, headers=key)),
            (413, "request_too_large", server.http.post(MESSAGES, content=b"x" * (1 << 24), headers=key)),
            (415, "invalid_request_error", server.http.post(MESSAGES, content=b"{}", headers=key)),
            (400, "invalid_request_error", server.http.post(COUNT, json={}, headers=key)),
        ):
            check_envelope(answer, status, kind)
        assert "error" in server.http.get("/v1/models").json(), "other paths have OpenAI's"
        assert "type" not in server.http.get("/v1/models").json()

    def test_in_a_stream_that_has_begun(self, serve, monkeypatch):
        """An administrator ends it: the last event is the error, and the id is that of the answer."""
        server = serve(embedded_engine(), "embedded", api_key="k", enable_admin_routes=True)
        key = {"x-api-key": "k"}
        body, step = ASKED | {"max_tokens": 50, "stream": True}, server.engine.core.step
        steps, go_on = itertools.count(), threading.Event()

        def held(*arguments):
            """The first step gives a token; the others wait."""
            assert next(steps) == 0 or go_on.wait(PATIENCE)
            return step(*arguments)

        monkeypatch.setattr(server.engine.core, "step", held)
        with server.http.stream("POST", MESSAGES, json=body, headers=key) as answer:
            chunks = answer.iter_text()
            text = next(chunks)
            begun = events_of(text.split("\n\n")[0] + "\n\n")[0]
            ended = server.http.post("/abort", json={"request_id": begun["message"]["id"]}, headers=key).json()
            go_on.set()
            text += "".join(chunks)
        last = events_of(text)[-1]
        assert ended == {"aborted": 1}
        assert last["type"] == "error"
        assert (last["error"]["type"], last["error"]["code"]) == ("overloaded_error", "request_aborted")
        assert last["request_id"] == answer.headers["request-id"]
        server.wait_until(lambda: not server.in_engine_thread(server.engine.has_unfinished_requests))
        server.check_idle()


class TestKeys:
    """A key opens by either header, and is a tenant of its own by either."""

    def test_headers(self, serve, tmp_path):
        (tmp_path / "keys").write_text("one\ntwo\n")
        server = serve(embedded_engine(), "embedded", api_key_file=str(tmp_path / "keys"))
        one, bearer, two = {"x-api-key": "one"}, {"authorization": "Bearer one"}, {"x-api-key": "two"}
        server.reset_cache()
        read = [
            create(server, messages=contents(QUESTION), headers=headers)["usage"]["cache_read_input_tokens"]
            for headers in (one, two, bearer, two)
        ]
        assert read[:2] == [0, 0]
        assert read[2] == read[3] > 0
        assert server.http.get("/v1/models", headers=one).status_code == 200
        for headers in (
            {"x-api-key": "three"},
            {"x-api-key": ""},
            {"authorization": "Bearer three", "x-api-key": "one"},
        ):
            answer = server.http.post(MESSAGES, json=ASKED, headers=headers)
            check_envelope(answer, 401, "authentication_error")


class TestWithoutEffect:
    def test_is_said_once(self, embedded, caplog, monkeypatch):
        """Fields of Anthropic's service alone are accepted, and logged once by name; those about the client never."""
        monkeypatch.setattr(request_fields, "_noted", set())
        fields = {"inference_geo": "eu", "context_management": {"edits": []}, "metadata": {"user_id": "u"}}
        fields["service_tier"] = "auto"
        beta = {"anthropic-beta": "interleaved-thinking-2025-05-14, files-api-2025-04-14"}
        plain = create(embedded, messages=contents(QUESTION))
        with caplog.at_level("INFO"):
            for _ in range(2):
                answer = create(embedded, messages=contents(QUESTION), headers=beta, **fields)
        assert text_of(answer) == text_of(plain)
        said = [one for one in caplog.messages if "is ignored" in one]
        for name in ("inference_geo", "context_management", "interleaved-thinking-2025-05-14", "files-api-2025-04-14"):
            assert len([one for one in said if name in one]) == 1
        assert not [one for one in said if "metadata" in one or "service_tier" in one]

    def test_a_mark_of_the_body_is_that_of_the_last_message(self):
        """What is cached up to it is the whole conversation, and not its first turn."""
        fields = {"model": "m", "max_tokens": 1, "messages": contents(QUESTION, "To", "Where?")}
        body = MessagesRequest.model_validate(fields | {"cache_control": {"type": "ephemeral"}})
        assert [one.cache_control is not None for one in as_chat(body).messages] == [False, False, True]

    def test_a_mark_of_calls_is_that_of_the_last_marked_one(self):
        """Two calls are one message, and a mark in the middle of it could not be kept."""
        calls = [
            {
                "type": "tool_use",
                "id": name,
                "name": "f",
                "input": {},
                "cache_control": {"type": "ephemeral", "ttl": ttl},
            }
            for name, ttl in (("a", "5m"), ("b", "1h"))
        ]
        turns = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": calls},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name} for name in "ab"]},
        ]
        body = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": turns})
        assert as_chat(body).messages[1].cache_control.ttl == "1h"

    def test_text_about_the_bill_is_left_out(self, embedded):
        """Text about the bill differs from request to request, and would hide the cached prefix."""
        blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"} for n in range(2)]
        text = {"type": "text", "text": SYSTEM}
        count = counted(embedded, system=SYSTEM, messages=contents(QUESTION))
        assert [counted(embedded, system=[one, text], messages=contents(QUESTION)) for one in blocks] == [count] * 2
