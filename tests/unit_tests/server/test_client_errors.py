"""SA-14: errors in the words that frameworks look for, ids of requests, HEAD, and fields without effect."""

from __future__ import annotations

import re
from typing import ClassVar

import pytest

from megatron_ext.server.access import LONGEST_ID
from tests.unit_tests.server.test_errors import CHAT, COMPLETIONS, check_error
from tests.unit_tests.support.server import embedded_engine

ID = re.compile(r"req_[0-9a-f]{32}")
HELLO = [{"role": "user", "content": "Hello"}]


class TestContextLength:
    """Too long a prompt begins with the words, and has the code, that LiteLLM and LangChain look for."""

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "param"), [([1], 2048, "max_tokens"), ([1] * 2050, 1, None), ([1] * 2048, 1, None)]
    )
    def test_counted_tokens(self, tiny, prompt, max_tokens, param):
        answer = tiny.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": max_tokens})
        error = check_error(answer, 400)
        assert error["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
        assert str(len(prompt) + max_tokens) in error["message"]
        assert "context_length_exceeded" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.fixture(scope="module")
def small(serve):
    return serve(embedded_engine(block_count=32), "embedded")


class TestSmallPool:
    """KV-12: a pool of 512 tokens, of a model with 4096 positions."""

    ASKED: ClassVar = {"temperature": 0, "ignore_eos": True}

    def test_other_routes_say_so_in_their_words(self, small):
        chat = small.http.post(CHAT, json={"messages": HELLO, "max_tokens": 3000} | self.ASKED).json()
        assert chat["choices"][0]["finish_reason"] == "length"
        assert chat["usage"]["total_tokens"] == 513
        response = small.http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 3000} | self.ASKED)
        assert response.json()["incomplete_details"] == {"reason": "max_output_tokens"}
        body = {"model": "embedded", "messages": HELLO, "temperature": 0}
        for count, reason in ((3000, "model_context_window_exceeded"), (2, "max_tokens")):
            message = small.http.post("/v1/messages", json=body | {"max_tokens": count}).json()
            assert message["stop_reason"] == reason

    @pytest.mark.parametrize(
        ("path", "field"), [(COMPLETIONS, "prompt"), (CHAT, "messages"), ("/v1/messages", "messages")]
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_larger_than_the_pool_is_refused_before_it_is_computed(self, small, path, field, stream):
        before = small.http.get("/prefix_cache").json()["occupancy"]
        text = "a b c " * 200
        prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        body = {"model": "embedded", "max_tokens": 1, "stream": stream} | prompt
        error = small.http.post(path, json=body).json()["error"]
        assert "512" in error["message"]
        said = "prompt is too long" if path == "/v1/messages" else "This model's maximum context length is 512 tokens"
        assert error["message"].startswith(said)
        assert small.http.get("/prefix_cache").json()["occupancy"] == before


class TestIds:
    """RP-6: every answer has an id, the request's own where it has one."""

    @pytest.mark.parametrize(
        ("method", "path", "body", "status"),
        [
            ("POST", COMPLETIONS, {"prompt": [1], "max_tokens": 1}, 200),
            ("POST", COMPLETIONS, {"prompt": [1], "max_tokens": 1, "stream": True}, 200),
            ("POST", COMPLETIONS, {"prompt": "", "max_tokens": 1}, 400),
            ("GET", "/health", None, 200),
            ("GET", "/nowhere", None, 404),
            ("GET", CHAT, None, 405),
        ],
    )
    def test_of_answers(self, tiny, method, path, body, status):
        given = tiny.http.request(method, path, json=body, headers={"X-Request-Id": "mine-1"})
        assert given.status_code == status
        assert given.headers.get_list("x-request-id") == ["mine-1"]
        first, second = (tiny.http.request(method, path, json=body).headers["x-request-id"] for _ in range(2))
        assert ID.fullmatch(first)
        assert first != second

    def test_unsafe_characters_are_left_out(self, tiny):
        for given, expected in (('a"b\\c; d\xe9', "abcd"), ("x" * 500, "x" * LONGEST_ID)):
            answer = tiny.http.get("/health", headers={"X-Request-Id": given.encode("latin-1")})
            assert answer.headers["x-request-id"] == expected
        assert ID.fullmatch(tiny.http.get("/health", headers={"X-Request-Id": '"";'}).headers["x-request-id"])

    def test_of_unexpected_errors(self, tiny, monkeypatch, caplog):
        """The handler of these is outside of other middleware; answer and log have id and status all the same.

        The answer says that the connection is closed: the next request on it would meet "connection reset".
        """
        monkeypatch.setattr(tiny.serving, "describe", lambda _: 1 / 0)
        with caplog.at_level("INFO"):
            answer = tiny.http.get("/v1/models", headers={"X-Request-Id": "mine-2"})
            tiny.wait_until(lambda: any("GET /v1/models" in one for one in caplog.messages if "duration" in one))
        check_error(answer, 500)
        assert answer.headers["x-request-id"] == "mine-2"
        assert answer.headers["connection"] == "close"
        assert [one for one in caplog.messages if "GET /v1/models 500" in one]
