"""SE-2: cost limits of one body: its length, its parts, its options; each refusal names the reason."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from fastapi import Request
from pydantic import ValidationError

from megatron_ext.config import ServerLimits
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.http import body as bodies
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest, Message
from tests.unit_tests.server.test_errors import CHAT, COMPLETIONS, HEADERS, check_alive, check_error
from tests.unit_tests.support.server import PATIENCE, LiveServer, tiny_engine

RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"
SMALL = ServerLimits(max_body_mb=4096 / 2**20)
GOOD = {"prompt": [1, 2], "max_tokens": 1}


@pytest.fixture(scope="module")
def small(serve) -> LiveServer:
    """A server that takes 4,096 bytes, and 4 + 4 requests."""
    return serve(tiny_engine(max_requests=4), max_waiting_requests=4, limits=SMALL)


def padded(size: int) -> bytes:
    """A good body of so many bytes."""
    content = json.dumps(GOOD).encode()
    return content + b" " * (size - len(content))


class TestLength:
    @pytest.mark.parametrize("is_chunked", [False, True], ids=["with its length", "chunked"])
    def test_a_body_that_is_too_long_is_413(self, small, is_chunked):
        for size, status in ((4096, 200), (4097, 413), (300_000, 413)):
            content = iter([padded(size)]) if is_chunked else padded(size)
            response = small.http.post(COMPLETIONS, content=content, headers=HEADERS)
            assert response.status_code == status
        assert "longer than the limit of 4096 bytes" in check_error(response, 413)["message"]
        check_alive(small)

    @pytest.mark.parametrize("chunks", [2, 10])
    def test_the_limit_is_that_of_all_chunks_together(self, chunks):
        """The limit holds for a body without a Content-Length, in chunks of half the limit each."""
        left = [{"type": "http.request", "body": b"x" * 50, "more_body": n < chunks} for n in range(1, chunks + 1)]

        async def receive() -> dict[str, object]:
            return left.pop(0)

        reading = bodies.read_body(Request({"type": "http", "headers": []}, receive), 100)
        if chunks == 2:
            assert asyncio.run(reading) == b"x" * 100
        else:
            with pytest.raises(ApiError) as refused:
                asyncio.run(reading)
            assert refused.value.status == 413
            assert len(left) == chunks - 3, "no more is read than it takes to see that it is too long"

    def test_a_length_that_is_too_long_is_refused_before_the_body_comes(self, small):
        host, port = small.url.removeprefix("http://").split(":")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4000000000\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as client:
            client.sendall(head.encode())
            assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


class TestContentType:
    @pytest.mark.parametrize(
        ("headers", "named"),
        [({}, "has no Content-Type"), ({"content-type": "text/plain"}, "is 'text/plain'")],
        ids=["none", "another"],
    )
    def test_other_content_types_name_the_accepted_one(self, tiny, headers, named):
        error = check_error(tiny.http.post(COMPLETIONS, content=padded(50), headers=headers), 415)
        assert named in error["message"]
        assert "send" in error["message"]
        assert "Content-Type: application/json" in error["message"]


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value}
    return value


class TestNesting:
    def test_deep_is_400_and_a_short_log(self, embedded, caplog):
        """A chat nested 900 deep ended in a 500 and 300 KB of log."""
        message = {"role": "assistant", "content": "a", "tool_calls": [nested(900)]}
        response = embedded.http.post(CHAT, json={"messages": [message], "max_tokens": 1})
        assert "nested too deeply; the limit is 64" in check_error(response, 400)["message"]
        assert sum(len(record.getMessage()) for record in caplog.records) < 1000
        check_alive(embedded)


@pytest.mark.parametrize("place", ["parsing", "tokenizing", "the engine's thread"])
def test_no_memory_is_503_for_that_request(tiny, monkeypatch, caplog, place):
    """The error is one line in the log, and the next request is served."""
    owner, name = {
        "parsing": (bodies.json, "loads"),
        "tokenizing": (tiny.serving.text_encoder, "_tokenize"),
        "the engine's thread": (tiny.engine.core, "add"),
    }[place]

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        response = tiny.http.post(COMPLETIONS, content=b'{"prompt": "<1>"}', headers=HEADERS)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert "no memory for this request" in response.json()["error"]["message"]
    assert [record.exc_info for record in caplog.records if record.levelname == "ERROR"] == [None]
    check_alive(tiny)


class TestParts:
    @pytest.mark.parametrize(
        ("kind", "body"),
        [
            (CompletionRequest, {"prompt": [*[1] * 5000, "a"]}),
            (CompletionRequest, {"prompt": [*["a"] * 5000, 1]}),
            (CompletionRequest, {"prompt": [*[[1]] * 5000, [True]]}),
            (CompletionRequest, {"prompt": [1], **{f"field{i}": 1 for i in range(5000)}}),
            (CompletionRequest, {"prompt": [1], "logit_bias": {str(i): 1 for i in range(5000)}}),
            (ChatRequest, {"messages": [1] * 5000}),
            (ChatRequest, {"messages": [{"role": "user", "content": "a", "tool_calls": [1] * 5000}]}),
            (ChatRequest, {"messages": [{"role": "user", "content": "a"}], "response_format": {"schema": [1] * 5000}}),
        ],
        ids=lambda value: value.__name__ if isinstance(value, type) else next(reversed(value)),
    )
    def test_many_bad_parts_are_few_errors(self, kind, body):
        """Pydantic makes an error of each part, unless it is told to stop: with millions of them the loop stood."""
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(body)
        assert caught.value.error_count() <= 4  # one for each type that a prompt may have

    @pytest.mark.parametrize(
        ("body", "marks"),
        [
            (b'["[[[[", "\\"[[[["]', b"[,]"),
            (b'["[[[[\\\\", [], {"{{": []}]', b"[,[],{:[]}]"),
            (b'["\\\\\\"[[[[[", []]', b"[,[]]"),
            (b'["[[[[[[', b"["),
            (b'["","", "[", "", {"": 1.5e3}]', b"[,,,,{:.e}]"),
        ],
    )
    def test_marks_in_strings_are_none(self, body, marks):
        assert bodies.without_strings(body).translate(None, b']}"') == marks.translate(None, b"]}")


CALL = {"type": "function", "function": {"name": "f"}}


def history(path: str, *arguments: str) -> dict[str, object]:
    """A conversation with the answer of calls with these arguments."""
    if path == RESPONSES:
        calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": one} for one in arguments]
        return {"input": [*calls, {"role": "user", "content": "a"}], "max_output_tokens": 1}
    calls = [CALL | {"function": {"name": "f", "arguments": one}} for one in arguments]
    body = {"messages": [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "a"}]}
    return body | ({} if path == TOKENIZE else {"max_tokens": 1})


@pytest.mark.parametrize("path", [CHAT, RESPONSES, TOKENIZE])
class TestArguments:
    """JSON text inside of a body has the limits of bodies, all texts of a request together."""

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (['{"a": [' + ",".join(["[]"] * 100_001) + "]}"], "100003 lists and objects; the limit is 100000"),
            (["[" + ",".join(["[]"] * 60_000) + "]"] * 2, "120002 lists and objects; the limit is 100000"),
            (["[" + ",".join(["1"] * 600_000) + "]"] * 2, "1199998 values; the limit is 1050000"),
            (["[" + '"[",' * 250_001], "500002 quotation marks of texts; the limit is 500000"),
            (["[" + "[1.5]," * 50_000 + "1.5," * 50_001], "100001 numbers with a fraction or an exponent"),
        ],
        ids=["many", "many together", "values together", "texts", "fractions"],
    )
    def test_limits(self, embedded, monkeypatch, path, arguments, named):
        loads, parsed = bodies.json.loads, []
        monkeypatch.setattr(bodies.json, "loads", lambda text, **how: parsed.append(len(text)) or loads(text, **how))
        response = embedded.http.post(path, json=history(path, *arguments))
        assert len(parsed) == len(arguments)  # of these and the body; the text that is too much is not parsed
        error = check_error(response, 400)
        assert named in error["message"]
        assert error["param"] == ("input" if path == RESPONSES else "messages")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"prompt": "é"}'.encode("utf-16-le"), "is not UTF-8; send JSON in UTF-8"),
        ('{"prompt": "é"}'.encode("utf-16"), "is not UTF-8; send JSON in UTF-8"),
        ('{"prompt": "é"}'.encode("utf-32-be"), "is not UTF-8; send JSON in UTF-8"),
        ('{"prompt": "é"}'.encode("latin-1"), "is not UTF-8; send JSON in UTF-8"),
        ('{"prompt": "é"}'.encode("utf-8-sig"), "byte order mark; send UTF-8 without it"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "a number of more than 4300 digits; send a smaller one"),
        (b'{"prompt": "a", "metadata": {"a": NaN}}', "the value NaN, which JSON does not have"),
        (b'{"prompt": "a", "metadata": {"a": [-Infinity]}}', "the value -Infinity, which JSON does not have"),
        (b'{"prompt": "a", "metadata": {"a": 1e999}}', "the number 1e999, which is too large; the limit is 1.798e+308"),
        (b'{"prompt": "a"', "is not JSON: Expecting"),
    ],
    ids=["utf-16", "with mark", "utf-32", "latin-1", "mark", "digits", "nan", "infinity", "overflow", "cut"],
)
def test_bytes_that_are_no_json(tiny, content, named):
    assert named in check_error(tiny.http.post(COMPLETIONS, content=content, headers=HEADERS), 400)["message"]


class TestRequestLimits:
    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"prompt": [[1]] * 9}, "9 requests (prompts: 9, n: 1); this server accepts at most 8"),
            ({"prompt": ["<1>"] * 9}, "(prompts: 9, n: 1)"),
            ({"prompt": [[1]] * 3, "n": 4}, "12 requests (prompts: 3, n: 4)"),
            ({"prompt": "<1>", "n": 9}, "9 requests (prompts: 1, n: 9); this server accepts at most 8"),
        ],
        ids=["ids", "texts", "both", "choices"],
    )
    def test_more_requests_than_could_ever_be_there(self, small, monkeypatch, fields, named):
        """Known before a text becomes tokens, or anything is built for the engine."""
        monkeypatch.setattr(small.serving.text_encoder, "encode", None)
        monkeypatch.setattr("megatron_ext.server.routes.generation.completion_inputs", None)
        assert named in check_error(small.http.post(COMPLETIONS, json=fields), 400)["message"]

    @pytest.mark.parametrize(
        ("stop", "named"),
        [(["a"] * 65, "at most 64 items"), (["b", "a" * 1025], "at most 1024 characters")],
        ids=["many", "long"],
    )
    def test_stop_words(self, tiny, stop, named):
        """Each is looked for after every token by the thread that steps the engine."""
        error = check_error(tiny.http.post(COMPLETIONS, json=GOOD | {"stop": stop}), 400)
        assert (error["param"], named in error["message"]) == ("stop", True)
        taken = [*(f"<{i}x" for i in range(63)), "a" * 1024]
        assert tiny.http.post(COMPLETIONS, json=GOOD | {"stop": taken}).status_code == 200

    def test_marks_are_counted_before_prefixes_are_built(self, monkeypatch):
        """With 10,000 marked parts of 700 characters the prefixes have 35 GB."""
        monkeypatch.setattr(Message, "marked_prefixes", None)
        part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [part] * 10_000, "cache_control": {"type": "ephemeral"}}]
        with pytest.raises(ValidationError, match="10001 cache_control marks; at most 4"):
            ChatRequest.model_validate({"messages": messages})


class TestTexts:
    def test_a_text_that_cannot_fit_does_not_become_tokens(self, embedded, monkeypatch):
        """8 MB of text took 7 s of all threads, and 1.5 GB."""
        longest = embedded.serving.tokenizer.longest_token * embedded.serving.limits.max_model_len
        with monkeypatch.context() as patch:
            patch.setattr(embedded.serving.text_encoder, "_tokenize", None)
            for path, body in (
                (COMPLETIONS, {"prompt": ["b" * (longest + 1), "a"]}),
                (CHAT, {"messages": [{"role": "user", "content": "b" * (longest + 1)}]}),
            ):
                error = check_error(embedded.http.post(path, json=body), 400)
                assert error["code"] == "context_length_exceeded"
                assert f"has at most {longest}" in error["message"]
        error = check_error(embedded.http.post(COMPLETIONS, json={"prompt": "b" * longest}), 400)
        assert "tokens of prompt" in error["message"]
        check_alive(embedded)
