"""SA-11: responses API: the answers of chat completions as typed items and events."""

from __future__ import annotations

import itertools
import json

import pytest

from megatron_ext.server.api_errors import ApiError
from tests.on_request import long_except
from tests.unit_tests.server.openai.test_reasoning import ANSWER, THINKING
from tests.unit_tests.server.test_errors import CHAT, check_error
from tests.unit_tests.support.agent_loop import TOOLS
from tests.unit_tests.support.responses_protocol import check_response, check_stream, events_of, without_ids
from tests.unit_tests.support.server import LiveServer, embedded_engine

RESPONSES = "/v1/responses"
QUESTION = "How is the weather in Oslo, and how will it be tomorrow?"
FLAT = [{"type": "function", **one["function"]} for one in TOOLS]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
BASE = {"model": "embedded", "max_output_tokens": 120, "temperature": 0.0}


def create(server: LiveServer, *, stream: bool = False, **fields) -> dict:
    """A response that has ended, checked, and if it is streamed with all of its events."""
    answer = server.http.post(RESPONSES, json=BASE | fields | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if stream:
        return check_stream(answer.text)
    check_response(answer.json())
    return answer.json()


def chat(server: LiveServer, **fields) -> dict:
    body = {"model": "embedded", "max_tokens": 120, "temperature": 0.0, "return_token_ids": True} | fields
    answer = server.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(role: str, text: object) -> dict:
    return {"role": role, "content": text}


def parts(kind: str, *texts: str) -> list[dict]:
    return [{"type": kind, "text": text} for text in texts]


ASKED = said("user", QUESTION)
LOOKUP = {"name": "lookup", "arguments": '{"city": "Oslo", "days": 2}'}
NOON = {"name": "clock", "arguments": "{}"}
# Fields of a response, and messages of the same conversation as a chat.
CONVERSATIONS = {
    "text": ({"input": QUESTION}, [ASKED]),
    "instructions": (
        {"instructions": "Be brief.", "input": [said("developer", "In English."), ASKED]},
        [said("system", "Be brief.\n\nIn English."), ASKED],
    ),
    "history": (
        {
            "input": [
                {"type": "message"} | said("user", parts("input_text", "How ", "are you?")),
                {"type": "message", "id": "msg_1", "status": "completed"}
                | said("assistant", parts("output_text", "Well.")),
                ASKED,
            ]
        },
        [said("user", "How are you?"), said("assistant", "Well."), ASKED],
    ),
    "calls": (
        {
            "tools": FLAT,
            "tool_choice": "none",
            "input": [
                ASKED,
                {"type": "message"} | said("assistant", "I look it up."),
                {"type": "function_call", "id": "fc_1", "call_id": "a", "status": "completed"} | LOOKUP,
                {"type": "function_call", "call_id": "b"} | NOON,
                {"type": "function_call_output", "call_id": "b", "output": "noon"},
                {"type": "function_call_output", "call_id": "a", "output": parts("input_text", "12 ", "degrees")},
            ],
        },
        [
            ASKED,
            said("assistant", "I look it up.")
            | {
                "tool_calls": [
                    {"id": "a", "type": "function", "function": LOOKUP},
                    {"id": "b", "type": "function", "function": NOON},
                ]
            },
            said("tool", "noon") | {"tool_call_id": "b"},
            said("tool", "12 degrees") | {"tool_call_id": "a"},
        ],
    ),
}


@pytest.mark.parametrize(
    ("name", "stream"),
    long_except(
        [("text", True), ("instructions", False), ("history", False), ("calls", True)],
        itertools.product(CONVERSATIONS, (False, True)),
    ),
)
def test_equals_chat_completions(embedded, name, stream):
    """Prompt, tokens, log-probs and counts are those of the same conversation as a chat."""
    items, messages = CONVERSATIONS[name]
    shared = {"tools": TOOLS, "tool_choice": "none"} if name == "calls" else {}
    embedded.reset_cache()
    first = chat(embedded, messages=messages, logprobs=True, top_logprobs=2, max_tokens=40, **shared)
    again = chat(embedded, messages=messages, max_tokens=40, **shared)
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 40}
    response = create(embedded, stream=stream, return_token_ids=True, **items, **fields)
    (choice,) = first["choices"]
    assert response["prompt_token_ids"] == first["prompt_token_ids"]
    assert response["token_ids"] == choice["token_ids"]
    ((part,),) = [one["content"] for one in response["output"]]
    assert part["text"] == choice["message"]["content"]
    expected = [one for one in choice["logprobs"]["content"] if one["bytes"]]  # token ids are shown, so all are there
    assert [one["token"] for one in part["logprobs"]] == [one["token"] for one in expected]
    assert [one["logprob"] for one in part["logprobs"]] == pytest.approx([one["logprob"] for one in expected], abs=1e-4)
    assert {len(one["top_logprobs"]) for one in part["logprobs"]} == {2}
    usage, known = response["usage"], again["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (known["prompt_tokens"], known["completion_tokens"])
    assert usage["input_tokens_details"]["cached_tokens"] == known["prompt_tokens_details"]["cached_tokens"] > 0
    cut_off = ("incomplete", {"reason": "max_output_tokens"})
    ended = (response["status"], response["incomplete_details"])
    assert ended == (cut_off if choice["finish_reason"] == "length" else ("completed", None))


class TestCounts:
    def test_hidden(self, serve):
        """SE-3: counts that clients expect are 0, and the others are left out."""
        server = serve(embedded_engine(), "embedded", hide_cache_counts=True)
        for _ in range(2):
            usage = create(server, input=QUESTION, max_output_tokens=1)["usage"]
            assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


class TestSampling:
    def test_options_are_those_of_a_chat(self, embedded):
        options = {"temperature": 1.3, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5, "logit_bias": {"203": 2}}
        response = create(embedded, input=QUESTION, max_output_tokens=12, return_token_ids=True, **options)
        asked = chat(embedded, messages=[{"role": "user", "content": QUESTION}], max_tokens=12, **options)
        assert response["token_ids"] == asked["choices"][0]["token_ids"]
        assert (response["temperature"], response["top_p"]) == (1.3, 0.9)


SAID = {
    "text": ("It is cold there.", {}, ["message"]),
    "calls": (f"I look it up.\n{CALL}\n{OTHER}", {"tools": FLAT}, ["message", "function_call", "function_call"]),
    "one call": (f"{CALL}\n{OTHER}", {"tools": FLAT, "parallel_tool_calls": False}, ["function_call"]),
    "a text after a call": (f"{CALL}\nSo it is.", {"tools": FLAT}, ["function_call", "message"]),
    "no calls": (CALL, {"tools": FLAT, "tool_choice": "none"}, ["message"]),
    "nothing": ("", {}, ["message"]),
    "a call cut off": (CALL, {"tools": FLAT, "max_output_tokens": 20}, ["function_call"]),
    "scores": (f"I look.\n{CALL}", {"tools": FLAT, "top_logprobs": 1}, ["message", "function_call"]),
}


class TestEvents:
    @pytest.mark.parametrize("name", long_except({"calls", "a text after a call", "a call cut off"}, SAID))
    def test_a_stream_adds_up_to_the_whole(self, embedded, prescribe, name):
        text, fields, kinds = SAID[name]
        fields = {"input": QUESTION, "presence_penalty": 0.1} | fields
        prescribe(embedded, text)
        create(embedded, **fields | {"max_output_tokens": 1})  # so that both find the prompt cached
        whole, streamed = (create(embedded, stream=stream, **fields) for stream in (False, True))
        assert without_ids(streamed) == without_ids(whole)
        assert [item["type"] for item in whole["output"]] == kinds
        is_cut = name == "a call cut off"
        assert [item["status"] for item in whole["output"]][-1] == ("incomplete" if is_cut else "completed")
        assert whole["status"] == ("incomplete" if is_cut else "completed")

    @pytest.mark.parametrize("name", long_except({"a call", "cut off"}, ["an answer", "a call", "cut off"]))
    def test_thinking_is_an_item(self, thinker, prescribe, name):
        rest, fields, kinds = {
            "an answer": (f"</think>\n\n{ANSWER}", {}, ["reasoning", "message"]),
            "a call": (f"</think>\n\n{CALL}", {"tools": FLAT}, ["reasoning", "function_call"]),
            "cut off": ("", {"max_output_tokens": 8}, ["reasoning"]),
        }[name]
        prescribe(thinker, f"<think>\n{THINKING}\n{rest}")
        fields |= {"presence_penalty": 0.1, "top_logprobs": 1}
        create(thinker, input=QUESTION, **fields | {"max_output_tokens": 1})
        whole, streamed = (create(thinker, input=QUESTION, stream=stream, **fields) for stream in (False, True))
        assert without_ids(streamed) == without_ids(whole)
        assert [item["type"] for item in whole["output"]] == kinds
        (thought,) = whole["output"][0]["content"]
        assert THINKING.startswith(thought["text"])
        assert (thought["text"] == THINKING) is (name != "cut off")
        assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] <= whole["usage"]["output_tokens"]
        if name == "an answer":
            (part,) = whole["output"][1]["content"]
            assert part["text"] == ANSWER
            assert ANSWER in "".join(one["token"] for one in part["logprobs"])
            assert "city" not in "".join(one["token"] for one in part["logprobs"])

    def test_a_fault_is_the_last_event(self, embedded, prescribe):
        prescribed = prescribe(embedded, "It is cold there.")
        prescribed.held_after = 3
        body = BASE | {"input": QUESTION, "stream": True, "presence_penalty": 0.1}
        with embedded.http.stream("POST", RESPONSES, json=body) as answer:
            lines = answer.iter_lines()
            received = []
            for line in lines:
                received.append(line)
                if "output_text.delta" in line:
                    break
            first = json.loads(received[1].removeprefix("data: "))
            group = embedded.serving.requests.groups[first["response"]["id"]]
            fault = ApiError(503, "it has ended", kind="server_error")
            embedded.loop.call_soon_threadsafe(embedded.serving.requests.end, group, fault)
            prescribed.gate.set()
            received += lines
        events = events_of("\n".join(received) + "\n")
        last = events[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "it has ended"}
        (item,) = last["response"]["output"]
        assert item["status"] == "incomplete"
        assert "It is cold there.".startswith(item["content"][0]["text"])
        embedded.wait_until(lambda: not embedded.in_engine_thread(embedded.engine.has_unfinished_requests))


class TestClient:
    """OpenAI's own client, whose helpers add events up by themselves."""

    @pytest.mark.parametrize(
        "choice",
        [
            {"type": "function", "name": "clock"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]},
        ],
        ids=["named", "allowed"],
    )
    def test_tool_choice(self, trained, choice):
        response = create(trained, input=QUESTION, tools=FLAT, tool_choice=choice, parallel_tool_calls=False)
        assert [(one["name"], one["arguments"]) for one in response["output"]] == [("clock", "{}")]
        assert response["tools"][2]["name"] == "clock"


REFUSED = [
    ({"background": True}, ["background", "not supported"], "background"),
    ({"conversation": "conv_1"}, ["conversation", "not supported"], "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, ["prompt", "not supported"], "prompt"),
    ({"tool_choice": {"type": "web_search_preview"}}, ["web_search_preview"], "tool_choice"),
    ({"tool_choice": "required"}, ["there are no tools"], "tool_choice"),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": "time"}}, ["'time'"], "tool_choice"),
    (
        {"tools": [*FLAT, {"type": "custom", "name": "a"}], "tool_choice": {"type": "custom", "name": "a"}},
        ["custom"],
        "tool_choice",
    ),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, ["web_search"], "tool_choice"),
    ({"input": [{"type": "web_search_call"}]}, ["input", "empty"], "input"),
    ({"input": [{"type": "sculpture"}]}, ["sculpture", "function_call_output"], "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, ["input.0.content", "input_image"], "input"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, ["call_id 'x'"], "input"),
    ({"input": []}, ["input", "empty"], "input"),
    ({"input": 5}, ["input", "text or a list"], "input"),
    ({"text": {"format": {"type": "grammar"}}}, ["text.format", "json_schema"], "text"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#/no"}}}}, ["schema"], "text.format"),
    ({"max_output_tokens": 5000}, ["4096"], "max_output_tokens"),
    ({"include": ["all"]}, ["include", "logprobs"], "include"),
    ({"messages": []}, ["messages"], "messages"),
    ({"n": 2}, ["n: is not supported"], "n"),
]


@pytest.mark.parametrize(("fields", "named", "param"), REFUSED, ids=str)
def test_refused_by_name(embedded, fields, named, param):
    body = BASE | {"input": QUESTION} | fields
    error = check_error(embedded.http.post(RESPONSES, json=body), 400)
    assert all(one in error["message"] for one in named), error["message"]
    assert error["param"] == param


HOSTED = [
    {"type": kind, "name": "x"} for kind in ("web_search", "custom", "local_shell", "apply_patch", "mcp", "a new one")
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tools_that_the_server_does_not_have_are_left_out(embedded, stream):
    """The answer is the one without them, and a header names them."""
    plain = create(embedded, input=QUESTION, tools=FLAT, max_output_tokens=8)
    body = BASE | {"input": QUESTION, "tools": [*HOSTED, *FLAT], "max_output_tokens": 8, "stream": stream}
    body |= {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [*HOSTED, *FLAT]}}
    answer = embedded.http.post(RESPONSES, json=body | {"client_metadata": {"a": "b"}})
    assert answer.status_code == 200, answer.text
    assert all(one["type"] in answer.headers["warning"] for one in HOSTED)
    response = check_stream(answer.text) if stream else answer.json()
    assert response["output"][0]["content"] == plain["output"][0]["content"]
    assert [one["name"] for one in response["tools"]] == [one["name"] for one in FLAT]


def test_items_of_other_servers(embedded):
    """Items without ids, with other states, of tools that are not here: what can be shown is, the rest is left out."""
    items = [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "status": "pondering",
            "content": [{"type": "output_text", "text": "Hm."}],
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin <|end|>"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"role": "user", "content": QUESTION},
    ]
    answer = embedded.http.post(
        RESPONSES, json=BASE | {"input": items, "max_output_tokens": 1, "return_token_ids": True}
    )
    assert answer.status_code == 200, answer.text
    prompt = embedded.serving.tokenizer.detokenize(answer.json()["prompt_token_ids"], skip_special_tokens=False)
    assert "*** Begin" in prompt
    assert "web_search_call" in answer.headers["warning"]
