"""Errors of requests: OpenAI's error object and the right status, and the server goes on."""

from __future__ import annotations

import json

import pytest

from tests.unit_tests.support.server import LiveServer, tiny_engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEADERS = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "<1>"}]
MARKED = {"role": "user", "content": [{"type": "text", "text": "<1>", "cache_control": {"type": "ephemeral"}}]}

# path, body, status, what the message must name, param
REFUSED = [
    (COMPLETIONS, {}, 400, ["prompt", "required"], "prompt"),
    (COMPLETIONS, [], 400, ["body"], None),
    (COMPLETIONS, {"prompt": 5}, 400, ["prompt", "string", "list"], "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, ["prompt", "empty"], "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, ["prompt", "empty"], "prompt"),
    (COMPLETIONS, {"prompt": [[1], []]}, 400, ["prompt", "empty"], "prompt"),
    (COMPLETIONS, {"prompt": ["<1>", 2]}, 400, ["prompt: must be a string", "token ids (integers)"], "prompt"),
    (COMPLETIONS, {"prompt": [97]}, 400, ["97", "0 to 96"], None),
    (COMPLETIONS, {"prompt": [-1]}, 400, ["-1"], None),
    (COMPLETIONS, {"prompt": [True]}, 400, ["prompt", "integers"], "prompt"),
    (COMPLETIONS, {"prompt": [10**40]}, 400, ["10000"], None),
    (COMPLETIONS, {"prompt": [1], "max_tokens": "5"}, 400, ["max_tokens", "integer"], "max_tokens"),
    (COMPLETIONS, {"prompt": [1], "max_tokens": 0}, 400, ["max_tokens", "1"], "max_tokens"),
    (COMPLETIONS, {"prompt": [1], "max_tokens": 2048}, 400, ["2049", "2048"], "max_tokens"),
    (COMPLETIONS, {"prompt": [1] * 2050}, 400, ["2066", "2048"], None),
    (COMPLETIONS, {"prompt": [1], "max_tokens": 2, "min_tokens": 3}, 400, ["min_tokens 3"], None),
    (COMPLETIONS, {"prompt": [1], "temperature": -1}, 400, ["temperature", "0"], "temperature"),
    (COMPLETIONS, {"prompt": [1], "temperature": "hot"}, 400, ["temperature", "number"], "temperature"),
    (COMPLETIONS, {"prompt": [1], "top_p": 1.5}, 400, ["top_p"], "top_p"),
    (COMPLETIONS, {"prompt": [1], "n": 0}, 400, ["n:"], "n"),
    (COMPLETIONS, {"prompt": [1], "n": 129}, 400, ["n:", "128"], "n"),
    (COMPLETIONS, {"prompt": [1], "stop": ["a", ""]}, 400, ["stop word is empty"], None),
    (COMPLETIONS, {"prompt": [1], "stop": 5}, 400, ["stop"], "stop"),
    (COMPLETIONS, {"prompt": [1], "logprobs": 21}, 400, ["logprobs", "20"], "logprobs"),
    (COMPLETIONS, {"prompt": [1], "best_of": 2}, 400, ["best_of", "not supported"], "best_of"),
    (COMPLETIONS, {"prompt": [1], "frequency_penalty": 2.5}, 400, ["frequency_penalty", "2"], "frequency_penalty"),
    (COMPLETIONS, {"prompt": [1], "logit_bias": {"a": 1}}, 400, ["logit_bias", "token ids and numbers"], "logit_bias"),
    (COMPLETIONS, {"prompt": [1], "logit_bias": {"97": 1}}, 400, ["logit_bias", "97", "vocabulary"], None),
    (COMPLETIONS, {"prompt": [1], "stop_token_ids": [1.5]}, 400, ["stop_token_ids", "integer"], "stop_token_ids"),
    (COMPLETIONS, {"prompt": [1], "repetition_penalty": 0}, 400, ["repetition_penalty"], "repetition_penalty"),
    (COMPLETIONS, {"prompt": [1], "bad_words": "a"}, 400, ["bad_words", "list"], "bad_words"),
    (
        COMPLETIONS,
        {"prompt": [1], "bad_words": ["a"] * 65},
        400,
        ["bad_words", "at most 64 items, not 65"],
        "bad_words",
    ),
    (
        COMPLETIONS,
        {"prompt": [1], "length_penalty": 2},
        400,
        ["length_penalty", "(1 is what happens"],
        "length_penalty",
    ),
    (COMPLETIONS, {"prompt": [1], "cache_checkpoint": [0]}, 400, ["cache_checkpoint", "1"], "cache_checkpoint"),
    (COMPLETIONS, {"prompt": [1], "cache_checkpoint": [9]}, 400, ["cache_checkpoint 9", "at most the 1"], None),
    (COMPLETIONS, {"prompt": [1], "cache_checkpoint": [1] * 65}, 400, ["cache_checkpoint", "64"], "cache_checkpoint"),
    (CHAT, {"messages": HELLO} | dict.fromkeys(map(str, range(128))), 400, ["fields; at most 128"], None),
    (CHAT, {"messages": HELLO, "prompt_cache_key": "a" * 513}, 400, ["prompt_cache_key", "512"], "prompt_cache_key"),
    (CHAT, {"messages": [MARKED] * 5}, 400, ["5 cache_control marks", "at most 4"], None),
    (COMPLETIONS, {"prompt": [1], "max_output_tokens": 5}, 400, ["max_output_tokens"], "max_output_tokens"),
    (COMPLETIONS, {"prompt": [1], "guided_regex": "a"}, 400, ["guided_regex", "not supported"], "guided_regex"),
    (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, 400, ["modalities", '(["text"] is'], "modalities"),
    (CHAT, {"messages": HELLO, "audio": {"voice": "a"}}, 400, ["audio", "not supported"], "audio"),
    (CHAT, {"messages": HELLO, "thinking": {"type": "disabled"}}, 400, ["thinking", "enable_thinking"], "thinking"),
    (COMPLETIONS, {"prompt": [1], "stream_options": {}}, 400, ["stream_options", "stream"], None),
    (COMPLETIONS, {"prompt": [1], "stream": 1}, 400, ["stream", "boolean"], "stream"),
    (COMPLETIONS, {"prompt": [1], "model": "gpt-5"}, 404, ["gpt-5", "tiny"], "model"),
    (CHAT, {"messages": HELLO, "model": "gpt-5"}, 404, ["gpt-5"], "model"),
    (CHAT, {"messages": HELLO}, 400, ["no chat template", COMPLETIONS], None),
    (CHAT, {"messages": []}, 400, ["messages"], "messages"),
    (CHAT, {"messages": "hello"}, 400, ["messages", "list"], "messages"),
    (CHAT, {"messages": HELLO, "tools": [{}]}, 400, ["tools", "required"], "tools"),
    (
        CHAT,
        {"messages": HELLO, "tool_choice": "required"},
        400,
        ["tool_choice", "there are no tools"],
        "tool_choice",
    ),
    (CHAT, {"messages": HELLO, "echo": True}, 400, ["echo"], "echo"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, ["max_tokens", "1"], "max_tokens"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, ["top_logprobs", "logprobs"], None),
    (CHAT, {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3}, 400, ["contradict"], None),
]
TYPES = {400: "invalid_request_error", 404: "invalid_request_error"}


def check_error(response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (name, error), *others = response.json().items()
    assert (name, others) == ("error", [])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].strip() == error["message"] != ""
    assert "\n" not in error["message"]
    return error


def check_alive(server: LiveServer) -> None:
    answer = server.http.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 2})
    assert answer.status_code == 200
    server.check_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body", "status", "named", "param"), REFUSED, ids=str)
def test_refused(tiny, path, body, status, named, param, stream):
    if stream and isinstance(body, dict):
        body = {"stream": True} | body
    if stream and named == ["stream_options", "stream"]:
        return
    error = check_error(tiny.http.post(path, json=body), status)
    assert error["type"] == TYPES[status]
    assert error["param"] == param
    for part in named:
        assert part in error["message"]


def test_the_server_goes_on_after_all_that(tiny):
    check_alive(tiny)


HALF = "\ud83d"
MESSAGES, RESPONSES, TOKENIZE = "/v1/messages", "/v1/responses", "/tokenize"
SCHEMA = {"type": "json_schema", "schema": {"enum": [HALF]}}
NAMED_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [HALF]}}}
ASKED = {"messages": HELLO, "max_tokens": 1}
TOOL = {"type": "function", "name": "f", "function": {"name": HALF}, "input_schema": {}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": HALF}, "prompt"),
        (COMPLETIONS, {"prompt": ["<1>", HALF]}, "prompt"),
        (COMPLETIONS, {"prompt": [1], "stop": HALF}, "stop"),
        (COMPLETIONS, {"prompt": [1], "cache_salt": HALF}, "cache_salt"),
        (COMPLETIONS, {"prompt": [1], "model": HALF}, "model"),
        (COMPLETIONS, {"prompt": [1], HALF: 1}, None),
        (CHAT, ASKED | {"response_format": NAMED_SCHEMA}, "response_format"),
        (CHAT, ASKED | {"tools": [TOOL]}, "tools"),
        (CHAT, ASKED | {"chat_template_kwargs": {HALF: 1}}, "chat_template_kwargs"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [{HALF: 1}]}]}, "messages"),
        (RESPONSES, {"input": "a", "metadata": {"a": HALF}}, "metadata"),
        (RESPONSES, {"input": "a", "metadata": {HALF: "a"}}, "metadata"),
        (RESPONSES, {"input": "a", "user": HALF, "stream": True}, "user"),
        (RESPONSES, {"input": "a", "text": {"format": SCHEMA}}, "text"),
        (RESPONSES, {"input": [{"role": "user", "content": HALF}]}, "input"),
        (MESSAGES, ASKED | {"output_config": {"format": SCHEMA}}, None),
        (MESSAGES, ASKED | {"what": HALF}, None),
        (TOKENIZE, {"prompt": HALF}, "prompt"),
        ("/detokenize", {"tokens": [1], "model": HALF}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_half_of_a_surrogate_pair_is_refused_before_anything_is_computed(tiny, monkeypatch, path, body, param):
    monkeypatch.setattr(tiny.serving.requests, "submit", None)
    monkeypatch.setattr(tiny.serving.text_encoder, "encode", None)
    response = tiny.http.post(path, content=json.dumps(body), headers=HEADERS)
    assert "half of a surrogate pair" in response.json()["error"]["message"]
    assert response.status_code == 400
    assert response.json()["error"].get("param") == param


def test_no_such_route(tiny):
    unknown = check_error(tiny.http.get("/v2"), 404)
    response = tiny.http.get(COMPLETIONS)
    other = check_error(response, 405)
    assert response.headers["allow"] == "POST"
    for error, path in ((unknown, "/v2"), (other, COMPLETIONS)):
        assert path in error["message"]
    assert "POST" in other["message"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/responses/a", "DELETE, GET"), ("/ping", "GET, POST"), ("/health", "GET, HEAD"), ("/docs", "GET")],
)
def test_a_wrong_method_is_told_all_methods_of_its_path(tiny, path, methods):
    response = tiny.http.put(path)
    assert check_error(response, 405)["message"].endswith(f"but {methods}")
    assert response.headers["allow"] == methods


@pytest.fixture(scope="module")
def locked(serve) -> LiveServer:
    return serve(tiny_engine(), api_key="open sesame")


class TestKey:
    @pytest.mark.parametrize("given", [None, "Bearer wrong", "open sesame", "Bearer  open sesame", "bearer"])
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", COMPLETIONS),
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("POST", "/reset_prefix_cache"),
            ("GET", "/prefix_cache"),
            ("GET", "/tokenizer_info"),
            ("GET", "/nowhere"),
        ],
    )
    def test_without_the_key_nothing_is_told(self, locked, method, path, given):
        """401 before the body is read: bad JSON is not told from good."""
        headers = {} if given is None else {"authorization": given}
        response = locked.http.request(method, path, content=b"{", headers=headers)
        error = check_error(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
