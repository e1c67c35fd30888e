"""SE-2: silent and slow clients lose their connections, not the others' time; numbers are small, on loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import io
import json
import logging
import re
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from megatron_ext.config import ServerLimits
from megatron_ext.server.http import connections as guarded
from megatron_ext.server.http.connections import (
    SPARE_FILES,
    Connections,
    GuardedProtocol,
    effective_max_connections,
)
from megatron_ext.server.log import REPEATS, RateLimitFilter
from megatron_ext.server.run import bind
from tests.unit_tests.server.test_errors import COMPLETIONS, check_alive
from tests.unit_tests.support.server import PATIENCE, LiveServer, read_all, tiny_engine

MOST = 6
LIMITS = ServerLimits(max_connections=MOST, header_timeout=60.0)
QUICK = ServerLimits(header_timeout=0.4, body_timeout=0.5, idle_timeout=0.4)
BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY_BEGUN = BEGUN + b"Content-Type: application/json\r\nContent-Length: 30000\r\n\r\n{"  # more than tests send


@pytest.fixture(scope="module")
def capped(serve) -> LiveServer:
    """A server of six connections."""
    return serve(tiny_engine(), limits=LIMITS)


@pytest.fixture(scope="module")
def quick(serve) -> LiveServer:
    """A server that loses patience after tenths of a second."""
    return serve(tiny_engine(), limits=QUICK)


def open_connections(server: LiveServer) -> int:
    return len(server._server.server_state.connections)


@contextlib.contextmanager
def sockets(server: LiveServer, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """Clients that say no more than that."""
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE)))
            found[-1].sendall(said)
        yield found


class TestCap:
    @pytest.mark.parametrize("said", [b"", BEGUN, BODY_BEGUN], ids=["nothing", "half a head", "half a body"])
    def test_silent_sockets_do_not_exclude_other_clients(self, capped, said):
        """The one that has waited longest makes room; a stream that is being answered stays."""
        body = {"prompt": [1, 2], "max_tokens": 30, "stream": True, "ignore_eos": True}
        with (
            capped.held() as holding,
            httpx.Client(base_url=capped.url, timeout=PATIENCE) as client,
            client.stream("POST", COMPLETIONS, json=body) as answer,
        ):
            events = answer.iter_lines()
            next(events)
            with sockets(capped, 4 * MOST, said) as silent:
                for _ in range(MOST):
                    assert httpx.get(f"{capped.url}/health", timeout=PATIENCE).status_code == 200
                assert open_connections(capped) <= MOST
                assert read_all(silent[0]) == b"", "the oldest is closed, without a word"
            holding.close()
            assert [line for line in events if line][-1] == "data: [DONE]"
        check_alive(capped)

    def test_if_all_are_being_answered_a_new_one_is_503(self, capped, monkeypatch):
        """The answer says when to retry."""
        begun, go_on = threading.Semaphore(0), threading.Event()
        step = capped.engine.core.step

        def slow(*arguments):
            begun.release()
            assert go_on.wait(PATIENCE)
            return step(*arguments)

        monkeypatch.setattr(capped.engine.core, "step", slow)
        capped.wait_until(lambda: open_connections(capped) <= 1)
        content = b'{"prompt": [1], "max_tokens": 1}'
        head = BEGUN + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
        try:
            with sockets(capped, MOST, head + content) as busy:
                assert begun.acquire(timeout=PATIENCE)
                capped.wait_until(lambda: capped.serving.requests.living == MOST)
                with sockets(capped, 1) as (late,):
                    answer = read_all(late)
                assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
                assert b"\r\nRetry-After: 1\r\n" in answer
                assert b"all 6 connections" in answer
                go_on.set()
                assert all(client.recv(4096).startswith(b"HTTP/1.1 200 OK") for client in busy)
        finally:
            go_on.set()
        check_alive(capped)


async def test_a_client_that_reads_again_has_its_time_anew():
    """TE-6: a pause that is over does not end the connection later."""
    config = uvicorn.Config(lambda *_: None)
    config.load()
    loop = asyncio.get_running_loop()
    made = [GuardedProtocol(Connections(1), LIMITS, config=config, server_state=ServerState(), app_state={})]
    async with await loop.create_server(lambda: made[0], "127.0.0.1", 0) as listening:
        _, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(BEGUN)
        while len(made[0]._guard) == 0:
            await asyncio.sleep(0)
        made[0].pause_writing()
        timer = made[0]._stall
        assert not timer.cancelled()
        made[0].resume_writing()
        assert timer.cancelled()
        writer.transport.abort()


@pytest.mark.realtime
class TestTimeOuts:
    @pytest.mark.parametrize(
        ("said", "answer"),
        [(b"", b""), (b"GE", b"HTTP/1.1 408 "), (BEGUN, b"HTTP/1.1 408 "), (BODY_BEGUN, b"HTTP/1.1 408 ")],
        ids=["nothing", "two bytes", "half a head", "half a body"],
    )
    def test_a_client_that_does_not_go_on_is_hung_up_on(self, quick, said, answer):
        with sockets(quick, 3, said) as clients:
            for client in clients:
                assert read_all(client)[: len(answer) or None] == answer
        quick.wait_until(lambda: open_connections(quick) <= 1)

    @pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\n", BODY_BEGUN], ids=["head", "body"])
    def test_one_that_drips_is_too(self, quick, begun):
        """Single bytes do not start the time anew."""
        with sockets(quick, 1, begun) as (client,):
            client.settimeout(0.02)
            answer = b""
            for _ in range(int(PATIENCE / 0.02)):
                with contextlib.suppress(TimeoutError):
                    answer = client.recv(4096)
                    break
                client.sendall(b" ")
            assert answer.startswith(b"HTTP/1.1 408 ")

    def test_between_two_requests(self, quick):
        """A next one in time is served, and has a time of its own."""
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with sockets(quick, 1, request) as (client,):
            answer = client.recv(4096)
            client.sendall(request)
            while answer.count(b'"status":"ok"') < 2:
                more = client.recv(4096)
                assert more, answer
                answer += more
            client.sendall(b"GET /hea")
            answer += read_all(client)
            assert (answer.count(b"HTTP/1.1 200 "), answer.count(b"HTTP/1.1 408 ")) == (2, 1)
        with sockets(quick, 1, request) as (client,):
            assert b"HTTP/1.1 408 " not in read_all(client)

    def test_errors_of_a_connection_are_not_in_the_form_of_an_earlier_request(self, quick):
        """Two requests come at once, the second one only in part."""
        whole = b"GET /v1/messages HTTP/1.1\r\nHost: localhost\r\n\r\n"
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        with sockets(quick, 1, whole + begun) as (client,):
            first, _, late = read_all(client).partition(b"HTTP/1.1 408 ")
        assert b'"type": "error"' in first
        assert b'"param": null' in late

    def test_an_answer_may_take_longer_than_all_of_them(self, quick, monkeypatch):
        step = quick.engine.core.step

        def slow(*arguments):
            time.sleep(0.6)
            return step(*arguments)

        monkeypatch.setattr(quick.engine.core, "step", slow)
        for stream in (False, True):
            answer = quick.http.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 2, "stream": stream})
            assert answer.status_code == 200
            assert "usage" in answer.text or answer.text.endswith("data: [DONE]\n\n")

    def test_a_client_that_does_not_read(self, quick, monkeypatch):
        """The connection is closed; bytes that the kernel buffers for it are not waited for."""
        monkeypatch.setattr("megatron_ext.server.monitoring.metrics.Metrics.render", lambda _: b"x" * 50_000_000)
        with sockets(quick, 1) as (client,):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            quick.wait_until(lambda: len(quick._server.server_state.tasks) == 1)
            quick.wait_until(lambda: not quick._server.server_state.tasks and open_connections(quick) <= 1)


def request(**fields: object) -> bytes:
    content = json.dumps({"prompt": [1, 2], "ignore_eos": True} | fields).encode()
    return BEGUN + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content


class TestEndOfTheClientsSide:
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    def test_whole_requests_are_answered(self, capped, monkeypatch, stream):
        """Also one that waits for long, and one behind another; bytes that probe the client are those of the answer."""
        monkeypatch.setattr(guarded, "LONGEST_PROBE", 0.001)
        said = request(max_tokens=3, stream=stream, logprobs=0)
        with sockets(capped, 1, said + said) as (client,):
            client.shutdown(socket.SHUT_WR)
            both = read_all(client)
        with capped.held() as holding, sockets(capped, 1, said) as (client,):
            client.shutdown(socket.SHUT_WR)
            start, probed = b"", re.compile(rb"\r\n0+\Z" if stream else rb"HTTP/1.1 \Z")
            while not probed.search(start):
                start += client.recv(65536)
            holding.close()
            waited = http.client.HTTPResponse(client)
            waited.fp = io.BytesIO(start + read_all(client))
            waited.begin()
            content = waited.read()
        assert waited.status == 200
        assert both.count(b"HTTP/1.1 200 OK\r\n") == 2
        assert content.count(b'"token_logprobs"') == (3 if stream else 1)
        capped.check_idle()

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    def test_of_one_that_is_gone_the_request_is_aborted(self, capped, stream):
        """Although nothing is generated that could be sent."""
        with capped.held():
            with sockets(capped, 1, request(max_tokens=100, stream=stream)) as (client,):
                capped.wait_until(lambda: capped.metric("requests_running") == 1)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b"H"
            capped.wait_until(lambda: capped.serving.requests.living == 0)

    @pytest.mark.parametrize("said", [BEGUN, BODY_BEGUN], ids=["half a head", "half a body"])
    def test_half_a_request_is_400(self, capped, said):
        with sockets(capped, 1, said) as (client,):
            client.shutdown(socket.SHUT_WR)
            answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"the connection ended before the request did" in answer


class TestAnswersToUnreadBodies:
    """E26: bytes that the kernel holds when a connection is closed reset it, and the answer is lost."""

    @pytest.fixture(scope="class")
    def small(self, serve) -> LiveServer:
        return serve(tiny_engine(), limits=ServerLimits(max_body_mb=0.1), api_key="sk-one")

    @pytest.mark.parametrize(
        ("path", "headers", "status"),
        [
            (COMPLETIONS, {"Authorization": "Bearer sk-one"}, 413),
            (COMPLETIONS, {}, 401),
            ("/v1/nowhere", {"Authorization": "Bearer sk-one"}, 404),
            (COMPLETIONS, {"Transfer-Encoding": "wrong"}, 400),
        ],
    )
    def test_can_be_read_by_clients_that_send_first(self, small, path, headers, status):
        """Python's urllib asks for `Connection: close` and reads nothing before it has sent all."""
        asked = urllib.request.Request(small.url + path, b"x" * 30_000_000, headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=PATIENCE)
        assert refused.value.status == status
        assert refused.value.read()

    def test_up_to_a_number_of_bytes(self, small, monkeypatch):
        monkeypatch.setattr(guarded, "DRAINED_BYTES", 1_000_000)
        head = BEGUN + b"Connection: close\r\nContent-Length: 4000000000\r\n\r\n"
        with sockets(small, 1, head) as (client,), pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(b"x" * 100_000_000)  # more than kernels hold, in memory that there is

    @pytest.mark.realtime
    def test_for_some_time(self, quick):
        with sockets(quick, 1, BEGUN + b"Connection: close\r\nContent-Length: 4000000000\r\n\r\n") as (client,):
            assert read_all(client).startswith(b"HTTP/1.1 413 ")
            quick.wait_until(lambda: open_connections(quick) <= 1)


class TestFiles:
    def test_the_cap_leaves_files_for_others(self, monkeypatch):
        """250 sockets at `ulimit -n 200` blocked everything."""
        taken = 40
        monkeypatch.setattr(guarded.os, "listdir", lambda _: ["file"] * taken)
        for files, most in ((200, 200 - taken - SPARE_FILES), (10_000, 1024), (resource.RLIM_INFINITY, 1024)):
            monkeypatch.setattr(guarded.resource, "getrlimit", lambda _, files=files: (files, files))
            assert effective_max_connections(ServerLimits()) == most

    def test_without_files_a_line_now_and_then_says_what_to_do(self, capped, monkeypatch, caplog):
        """Asyncio logs a traceback for each of its tries, second after second: 150 MB in 20 s."""

        class OutOfFiles(socket.socket):
            def accept(self):
                raise OSError(errno.EMFILE, "Too many open files")

        async def fail(listener: OutOfFiles) -> None:
            serving = asyncio.get_running_loop().create_server(asyncio.Protocol, sock=listener, backlog=4 * REPEATS)
            async with await serving:
                with socket.create_connection(listener.getsockname()):
                    while not caplog.records:
                        await asyncio.sleep(0)

        monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 10 * PATIENCE)
        monkeypatch.setattr(guarded.logger, "filters", [RateLimitFilter()])
        listener = OutOfFiles(fileno=bind("127.0.0.1", 0).detach())
        asyncio.run_coroutine_threadsafe(fail(listener), capped.loop).result(PATIENCE)
        lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert 1 <= len(lines) <= REPEATS
        assert all("`ulimit -n` is" in record.getMessage() and record.exc_info is None for record in lines)
