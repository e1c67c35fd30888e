"""The server's log: one line per request, never texts; start and shutdown; no control characters."""

from __future__ import annotations

import asyncio
import io
import logging
import math
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import httpx
import pytest

from megatron_ext.server import access, api_errors
from megatron_ext.server.log import (
    LONGEST_TRACEBACK,
    REQUEST_ID,
    LineFormatter,
    RateLimitFilter,
)
from tests.unit_tests.server.test_errors import CHAT, COMPLETIONS
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import PATIENCE, LiveServer, tiny_engine

PROMPT = make_prompt(40, seed=3)
SECRET = "<90>"
LINE = re.compile(
    r"(?P<id>\S+) (?P<method>\S+) (?P<path>.+) (?P<status>\d+)"
    r"( prompt=(?P<prompt>\S+) skipped=(?P<skipped>\S+) generated=(?P<generated>\S+) ttft=(?P<ttft>\S+)"
    r"( failed=(?P<failed>\d+))?)? duration=(?P<duration>\d+\.\d{3})"
)


@pytest.fixture(scope="module")
def server(serve) -> LiveServer:
    return serve(tiny_engine(block_count=8))


@pytest.fixture
def lines(server, caplog):
    """A function: the next lines of requests, parsed."""
    caplog.set_level(logging.INFO, "megatron_ext")

    def read(count: int = 1) -> list[dict[str, str]]:
        def found() -> list[logging.LogRecord]:
            return [record for record in caplog.records if record.name == access.__name__]

        server.wait_until(lambda: len(found()) >= count)
        texts = [record.getMessage() for record in found()]
        caplog.clear()
        assert len(texts) == count, texts
        return [LINE.fullmatch(text).groupdict() for text in texts]

    return read


class TestRequests:
    def test_counts_and_times(self, server, lines):
        """Equal to what the answer itself says."""
        server.reset_cache()
        body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "n": 2}
        for skipped in (0, 32):
            answer = server.http.post(COMPLETIONS, json=body).json()
            (line,) = lines()
            assert (line["id"], line["method"], line["path"]) == (answer["id"], "POST", COMPLETIONS)
            counts = (line["status"], line["prompt"], line["skipped"], line["generated"], line["failed"])
            assert counts == ("200", "40", str(skipped), "6", None)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == skipped
            assert 0 < float(line["ttft"]) <= float(line["duration"])

    def test_an_id_that_the_client_gives(self, server, lines, caplog):
        """RP-6: it ends the line of its request, without unsafe characters and cut; another request has its own."""
        caplog.handler.setFormatter(LineFormatter())
        body, answers = {"prompt": PROMPT, "max_tokens": 1}, []
        for headers in ({"X-Request-Id": "mine " + "x" * 200}, {}):
            answers.append(server.http.post(COMPLETIONS, json=body, headers=headers).headers["x-request-id"])
        server.wait_until(lambda: caplog.text.count(access.__name__) == 2)
        first, second = [line for line in caplog.text.splitlines() if access.__name__ in line]
        assert re.search(r"duration=\S+ request=minex{96}$", first), first
        assert second.endswith(f" request={answers[1]}")

    def test_never_texts(self, server, caplog):
        """Nor what comes after a question mark, nor a path that is one."""
        caplog.set_level(logging.DEBUG, "megatron_ext")
        body = {"prompt": SECRET, "max_tokens": 2, "stop": [SECRET], "cache_salt": SECRET, "user": SECRET}
        server.http.post(COMPLETIONS, json=body)
        server.http.post(COMPLETIONS, json=body | {"top_p": SECRET})
        server.http.get("/v1/models?key=" + SECRET)
        server.wait_until(lambda: len([one for one in caplog.records if one.name == access.__name__]) == 3)
        own = [one.getMessage() for one in caplog.records if one.name.startswith("megatron_ext")]
        assert not any("90" in re.sub(r"cmpl-\w+|duration=\S+|ttft=\S+", "", line) for line in own)


QUOTED = "z'q\"x canary"
BODIES = [
    (COMPLETIONS, {"prompt": QUOTED, "top_p": QUOTED}),
    (COMPLETIONS, {"prompt": [1], "echo": True, "bad_words": [QUOTED], "stop": [QUOTED, ""]}),
    (COMPLETIONS, {"prompt": [1], "structured_outputs": {"regex": f"({QUOTED}"}}),
    (COMPLETIONS, {"prompt": [1], "structured_outputs": {"choice": [QUOTED, 5]}}),
    (CHAT, {"messages": [{"role": QUOTED, "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": QUOTED, "text": QUOTED}]}]}),
    (CHAT, {"messages": [{"role": "user", "content": QUOTED}], "reasoning_effort": QUOTED}),
    ("/v1/responses", {"input": [{"type": QUOTED, "content": QUOTED}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": QUOTED, "output": QUOTED}]}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": QUOTED}]}]}),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": QUOTED, "content": QUOTED}]}),
    ("/tokenize", {"prompt": QUOTED, "messages": [{"role": QUOTED, "content": QUOTED}]}),
]


class TestReasons:
    """Why a client got a 4xx."""

    @pytest.fixture
    def reasons(self, caplog, monkeypatch):
        """A function: the lines so far; and the time."""
        now = [0.0]
        monkeypatch.setattr(api_errors.logger, "filters", [RateLimitFilter(clock=lambda: now[0])])
        return lambda: [one.getMessage() for one in caplog.records if one.name == api_errors.__name__], now

    @pytest.mark.parametrize(("path", "body"), BODIES)
    def test_never_with_a_text_of_the_body(self, server, reasons, caplog, path, body):
        caplog.set_level(logging.INFO, access.__name__)
        answer = server.http.post(path, json={"model": "tiny"} | body)
        assert answer.status_code == 400, answer.text
        # A line that comes later would be one of the next test.
        server.wait_until(lambda: any(one.name == access.__name__ for one in caplog.records))
        (line,) = reasons[0]()
        assert line.startswith("400 ")
        assert not any("canary" in record.getMessage() for record in caplog.records)


class TestTheEnd:
    @pytest.mark.parametrize("is_cut_short", [False, True])
    def test_a_request_that_the_engine_does_not_have_yet_counts(self, serve, caplog, monkeypatch, is_cut_short):
        """A second signal gives it a 503, wherever it waits; the SIGTERM that a launcher adds to a SIGINT is none."""
        caplog.set_level(logging.INFO, "megatron_ext")
        monkeypatch.setattr("megatron_ext.server.run.ONE_WISH", math.inf)
        server = serve(tiny_engine(), shutdown_timeout=PATIENCE)
        begun, go_on = threading.Event(), threading.Event()

        async def check(_: object) -> None:
            begun.set()
            await asyncio.to_thread(go_on.wait, PATIENCE)

        server.serving.structured_outputs.check = check
        body = {"prompt": [1], "max_tokens": 1}
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(server.http.post, COMPLETIONS, json=body)
            assert begun.wait(PATIENCE)
            assert server.serving.requests.living == 0
            server._server.handle_exit(signal.SIGINT, None)
            server._server.handle_exit(signal.SIGTERM, None)
            server.wait_until(lambda: "shutdown begins: 1 requests in flight" in caplog.text)
            if is_cut_short:
                server._server.handle_exit(signal.SIGINT, None)
                assert answer.result(PATIENCE).status_code == 503
            go_on.set()
            assert answer.result(PATIENCE).status_code == (503 if is_cut_short else 200)
        server.stop()
        assert (
            f"shutdown ends: {'0 requests finished, 1' if is_cut_short else '1 requests finished, 0'} cancelled"
            in caplog.text
        )
        assert caplog.text.count("a second signal") == is_cut_short

    def test_a_client_that_does_not_read_is_not_waited_for(self, serve, caplog, monkeypatch):
        caplog.set_level(logging.INFO)
        monkeypatch.setattr("megatron_ext.server.run.LAST_WORDS", 0)
        monkeypatch.setattr("megatron_ext.server.monitoring.metrics.Metrics.render", lambda _: b"x" * 50_000_000)
        server = serve(tiny_engine(), shutdown_timeout=0.0)
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port), timeout=PATIENCE) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.recv(1)
            server.stop()
        assert [one for one in caplog.records if one.exc_info] == []


@pytest.fixture
def log():
    """A logger as the tool sets it up, and what it has written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("some.where")
    logger.addHandler(handler)
    return logger, stream.getvalue


class TestLines:
    def test_with_the_id_of_the_request(self, log):
        logger, written = log
        copy_context().run(lambda: (REQUEST_ID.set("r7"), logger.info("slow")))
        logger.info("idle")
        assert [line.partition("some.where: ")[2] for line in written().splitlines()] == ["slow request=r7", "idle"]

    def test_control_characters_never_reach_a_terminal(self, log):
        """Nor line ends, which could forge a record, nor what turns the direction of a text."""
        logger, written = log
        logger.warning("%s", "a\x1b]0;title\x07\r\n2026 INFO forged\u202e\x9b31m\ud800 grüße 你好")
        (line,) = written().splitlines()
        assert line.endswith(r"a\x1b]0;title\x07\r\n2026 INFO forged\u202e\x9b31m\ud800 grüße 你好")

    def test_a_traceback_has_one_too(self, log):
        """A chat nested 900 deep logged 300 KB."""

        def descend(depth: int) -> None:
            if depth == 0:
                raise ValueError("bottom\n2026 INFO forged\x1b[31m" + "b" * 100_000)
            descend(depth - 1)

        logger, written = log
        try:
            descend(min(500, sys.getrecursionlimit() // 3))
        except ValueError:
            logger.exception("failed")
        first, *others = written().splitlines()
        assert first.endswith("ERROR some.where: failed")
        assert all(line.startswith("    ") for line in others)
        assert "forged" not in first
        assert len(written()) < 2 * LONGEST_TRACEBACK
        assert "\x1b" not in written()

    def test_repeated_records_are_counted(self, log):
        logger, written = log
        now = [0.0]
        logger.addFilter(RateLimitFilter(limit=2, seconds=10, clock=lambda: now[0]))
        for second in range(25):
            now[0] = float(second)
            logger.warning("%s fails", "this")
            if second < 3:
                logger.warning("another place")
        said = [line.split(": ", 1)[1] for line in written().splitlines()]
        assert said.count("another place") == 2
        assert [line for line in said if "this" in line] == [
            "this fails",
            "this fails",
            "this fails (8 more such lines were left out)",
            "this fails",
            "this fails (8 more such lines were left out)",
            "this fails",
        ]
