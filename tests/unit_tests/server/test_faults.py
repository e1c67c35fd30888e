"""SE-2: an exception anywhere in the engine's loop ends only the requests that it concerns, if any, and is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.server.monitoring.metrics import Metrics
from megatron_ext.server.request_manager import RequestHandle, TokenClock
from megatron_ext.text.detokenizer import StopWordMatcher, TextStream
from tests.unit_tests.support.server import PATIENCE, LiveServer, tiny_engine

VICTIM = [9, 8, 7, 6, 5]
OTHERS = ([1, 2, 3], [4, 5, 6, 7])


class Planted(Exception):
    """Injected error."""


@pytest.fixture(scope="module")
def server(serve) -> LiveServer:
    return serve(tiny_engine())


@pytest.fixture
def counted(server) -> Iterator[Callable[[], int]]:
    """Number of errors that /health has counted since the test began; checks that the server is idle afterwards."""
    before = server.http.get("/health").json()["errors"]
    yield lambda: server.http.get("/health").json()["errors"] - before
    assert ask(server, OTHERS[0])["choices"][0]["finish_reason"] == "length"
    server.check_idle()
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")


def body(prompt: list[int], **fields: object) -> dict:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 12} | fields


def ask(server: LiveServer, prompt: list[int], **fields: object) -> dict:
    return server.http.post("/v1/completions", json=body(prompt, **fields)).json()


def ask_all(server: LiveServer, prompts: list[list[int]], **fields: object) -> list[str]:
    """Several clients at once: what each was sent."""

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            posts = [client.post("/v1/completions", json=body(prompt, **fields)) for prompt in prompts]
            return [answer.text for answer in await asyncio.gather(*posts)]

    return asyncio.run(run())


def is_victims(source: object, *_: object) -> bool:
    """Return whether a request, a record or a progress is of the victim."""
    return list(getattr(source, "prompt_tokens", ())) == VICTIM


def raising(function: Callable, *, of: Callable[..., bool] = lambda *_: True) -> Callable:
    def call(*args: object, **kwargs: object) -> object:
        if of(*args):
            raise Planted("planted")
        return function(*args, **kwargs)

    return call


def texts(answers: list[str]) -> list[str]:
    """Texts of whole answers."""
    return [json.loads(answer)["choices"][0]["text"] for answer in answers]


def streamed_text(answer: str) -> str:
    """Text of a streamed answer, which must have ended well."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line]
    assert lines[-1] == "[DONE]", answer
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


class TestOneRequest:
    """Errors of one request: its client gets an error; the others get the answers they would have got without it."""

    @pytest.fixture
    def expected(self, server) -> list[str]:
        return [ask(server, prompt)["choices"][0]["text"] for prompt in OTHERS]

    def test_stop_words(self, server, counted, expected, monkeypatch):
        feed = StopWordMatcher.feed
        monkeypatch.setattr(StopWordMatcher, "feed", raising(feed, of=lambda one, *_: one._stop_words == ("poison",)))
        prompts = [OTHERS[0], OTHERS[1]]
        bad = server.http.post("/v1/completions", json=body(VICTIM, stop="poison"))
        assert bad.status_code == 500
        assert bad.json()["error"]["message"] == "Planted: planted"
        assert bad.json()["error"]["code"] == "request_failed", "it would fail elsewhere, too"
        assert texts(ask_all(server, prompts, stop="no such word")) == expected
        assert counted() == 1

    def test_the_text_of_a_stream(self, server, counted, expected, monkeypatch):
        """Outside the engine's loop: its client is told, and nothing is counted."""
        feed = TextStream.feed
        monkeypatch.setattr(TextStream, "feed", raising(feed, of=lambda one, _: one._stop_words == ("poison",)))
        answer = server.http.post("/v1/completions", json=body(VICTIM, stream=True, stop="poison"))
        assert "the engine failed: Planted" in answer.text
        assert [streamed_text(one) for one in ask_all(server, list(OTHERS), stream=True)] == expected
        assert counted() == 0

    @pytest.mark.parametrize("stream", [False, True])
    def test_handing_it_its_news(self, server, counted, expected, monkeypatch, stream):
        failed: list[str] = []

        def fail_once(handle: RequestHandle, name: str, value: object) -> None:
            if name in ("result", "progress") and is_victims(value) and not failed:
                failed.append(name)
                raise Planted("planted")
            object.__setattr__(handle, name, value)

        monkeypatch.setattr(RequestHandle, "__setattr__", fail_once)
        victim, *others = ask_all(server, [VICTIM, *OTHERS], stream=stream)
        assert failed == ["progress" if stream else "result"]
        assert "the engine failed: Planted" in victim
        assert ([streamed_text(one) for one in others] if stream else texts(others)) == expected
        assert counted() == 1


PARTS = {
    "metrics of a request": (Metrics, "observe"),
    "state of the engine": (EngineStatistics, "of"),
    "token clock": (TokenClock, "gaps"),
}


class TestNoRequestAffected:
    """Errors of metrics and clocks: all requests are served, and the error is counted."""

    @pytest.mark.parametrize("part", PARTS)
    def test_all_are_served(self, server, counted, monkeypatch, part):
        expected = [ask(server, prompt)["choices"][0]["text"] for prompt in OTHERS]
        owner, name = PARTS[part]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(getattr(owner, name)))
            assert texts(ask_all(server, list(OTHERS))) == expected
            assert streamed_text(ask_all(server, [OTHERS[0]], stream=True)[0]) == expected[0]
            server.wait_until(lambda: server.serving.requests.living == 0)
            assert counted() >= 3


def test_a_failed_step_is_counted_too_and_is_a_503(server, monkeypatch):
    """SE-2: until a step has computed something again."""
    before = server.http.get("/health").json()["errors"]
    with monkeypatch.context() as patch:
        patch.setattr("megatron_ext.mcore.context.stage_step", raising(lambda: None))
        assert server.http.post("/v1/completions", json=body(VICTIM)).status_code == 500
        server.wait_until(lambda: server.serving.requests.living == 0)
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failing")
        assert health.json()["errors"] == before + 3
    ask(server, OTHERS[0])
    assert server.http.get("/health").status_code == 200
    server.check_idle()
