"""OpenAI's routes under Ray Serve, called by Ray's proxy directly, and through an ingress on two ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.ray

PATIENCE = 60.0  # seconds until a test gives up; nothing is measured
PROMPT = {"prompt": "The import statement", "max_tokens": 8, "temperature": 0}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"router": "serve"}, id="serve"),
        pytest.param({"router": "prefix", "tensor_model_parallel_size": 2}, id="prefix"),
    ],
)
def client(request: pytest.FixtureRequest, run: Callable[..., httpx.Client]) -> httpx.Client:
    return run(**request.param, api_key="k")


def events(client: httpx.Client, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    """Events of a stream, without the last one."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_and_streams_are_equal(client: httpx.Client):
    """RP-6: a completion, a conversation and their streams, several choices included."""
    answer = client.post("/v1/completions", json=PROMPT | {"n": 2}).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["text"] == answer["choices"][1]["text"]
    parts = events(client, "/v1/completions", PROMPT)
    assert len(parts) > 1
    assert "".join(part["choices"][0]["text"] for part in parts) == answer["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=chat).raise_for_status().json()["choices"][0]["message"]["content"]
    parts = events(client, "/v1/chat/completions", chat)
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == whole


def test_a_client_that_leaves_ends_its_request(client: httpx.Client):
    """RP-6: the engine stops computing, and the metrics count an aborted request."""
    endless = PROMPT | {"max_tokens": 4000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=endless) as answer:
        lines = answer.iter_lines()  # closes the answer when it is deleted
        next(lines)
        assert client.get("/load").json()["server_load"] == 1
    deadline = time.monotonic() + PATIENCE
    while client.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline, "the request goes on"
    metrics = client.get("/metrics").text
    counts = [
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "megatron_ext_requests_total" and sample.labels["outcome"] == "aborted"
    ]
    assert sum(counts) == 1.0
