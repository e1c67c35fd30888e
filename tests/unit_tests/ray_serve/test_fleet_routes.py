"""Routes of an ingress that concern all replicas: applications of two engines, called as Ray Serve does; no Ray."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.config import ServerConfig
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.ray_serve import fleet_routes
from megatron_ext.ray_serve.fleet_routes import ANSWERED_BY, Answers, FleetRoutes, WholeAnswer, whole_answer
from megatron_ext.ray_serve.forwarded import ForwardedRequest
from megatron_ext.ray_serve.replica_status import ADMIN_PATHS, status_router
from megatron_ext.server.app import create_app
from megatron_ext.server.serving import Serving
from tests.unit_tests.support.server import tiny_engine

NAMES = ("aaaa1111", "bbbb2222")
PROMPT = {"prompt": list(range(1, 41)), "max_tokens": 1, "temperature": 0}
ADMIN, TENANT = {"authorization": "Bearer admins"}, {"authorization": "Bearer k"}


async def other_routes(scope: Scope, receive: Receive, send: Send) -> None:
    """Application behind the ingress that one replica answers."""
    answer = JSONResponse({"path": scope["path"]})

    async def naming(message: Message) -> None:
        await send(message | {ANSWERED_BY: NAMES[1]} if message["type"] == "http.response.start" else message)

    await answer(scope, receive, naming)


class Fleet:
    """Replicas by name, behind the routes of an ingress; those in `silent` do not answer."""

    def __init__(self, apps: dict[str, ASGIApp], root_path: str = "") -> None:
        self.apps, self.silent = apps, {}
        self.ingress = FleetRoutes(other_routes, self.ask_all, 1000)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.ingress, root_path=root_path), base_url="http://127.0.0.1"
        )

    async def ask_all(self, request: ForwardedRequest, patience: float) -> Answers:
        assert patience > 0
        living = {name: app for name, app in self.apps.items() if name not in self.silent}
        return self.silent | {name: await whole_answer(app, request, name) for name, app in living.items()}


def fixed(**answers: tuple[int, bytes] | str) -> Fleet:
    """Fleet whose replicas give these answers to anything."""
    fleet = Fleet({})

    async def ask_all(request: ForwardedRequest, patience: float) -> Answers:
        return {
            name: one if isinstance(one, str) else WholeAnswer(name, one[0], ((b"content-type", b"x/y"),), one[1])
            for name, one in answers.items()
        }

    fleet.ingress._ask_all = ask_all
    return fleet


@contextlib.asynccontextmanager
async def two_replicas(root_path: str = "", **settings: object) -> AsyncIterator[Fleet]:
    apps = {}
    async with contextlib.AsyncExitStack() as running:
        for name in NAMES:
            serving = Serving(LLMEngine(tiny_engine()), "tiny", ServerConfig(**settings))
            app = create_app(serving, routers=(status_router(name, "10.0.0.1"),), admin_paths=ADMIN_PATHS)
            await running.enter_async_context(app.router.lifespan_context(app))
            apps[name] = app
        yield Fleet(apps, root_path)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with two_replicas() as found:
        for app in found.apps.values():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                for _ in range(2):
                    (await http.post("/v1/completions", json=PROMPT)).raise_for_status()
        yield found


async def test_health_is_that_of_all(fleet: Fleet):
    """RP-6: one healthy replica is enough, and a replica that does not answer is counted."""
    answer = await fleet.http.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "replicas": {"ok": 2}})
    fleet.silent = {NAMES[0]: "no answer within 2 s"}
    assert (await fleet.http.get("/ping")).json() == {"status": "ok", "replicas": {"silent": 1, "ok": 1}}
    fleet.silent |= {NAMES[1]: "no answer within 2 s"}
    assert (await fleet.http.get("/health")).status_code == 503


async def test_metrics_have_the_replica_as_label(fleet: Fleet):
    """RP-6: every sample of every replica, once, in a text that Prometheus can read."""
    text = (await fleet.http.get("/metrics")).text
    merged = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    expected = {}
    for name, app in fleet.apps.items():
        alone = (await whole_answer(app, request("/metrics"), name)).body.decode()
        for family in text_string_to_metric_families(alone):
            for sample in family.samples:
                expected[sample.name, frozenset((sample.labels | {"replica": name}).items())] = sample.value
    assert merged == expected
    headings = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(headings) == len(set(headings))


async def test_metrics_are_merged_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    """RP-6: streams go on while the metrics of many replicas are parsed; those of a failed replica are missing."""
    threads = []

    def parse(text: str) -> Iterator[Metric]:
        threads.append(threading.current_thread())
        return text_string_to_metric_families(text)

    monkeypatch.setattr(fleet_routes, "text_string_to_metric_families", parse)
    answer = await fixed(a=(200, b"x 1.0\n"), b=(500, b'{"error": {}}')).http.get("/metrics")
    assert (answer.status_code, answer.text.splitlines()[-1]) == (200, 'x{replica="a"} 1.0')
    assert threads
    assert threading.current_thread() not in threads


async def test_rows_of_the_status_page(fleet: Fleet):
    """RP-6: load, cache, hits and health of each replica; one that does not answer says so."""
    content = (await fleet.http.get("/replicas")).json()
    assert [row["replica"] for row in content["replicas"]] == list(NAMES)
    row = content["replicas"][0]
    assert (row["status"], row["node"], row["skipped"], row["computed"], row["hits"]) == ("ok", "10.0.0.1", 32, 48, 1)
    assert row["blocks_cached"] > 0
    fleet.silent = {NAMES[1]: "no answer within 2 s"}
    rows = (await fleet.http.get("/replicas")).json()["replicas"]
    assert {row["replica"]: row["status"] for row in rows} == {NAMES[0]: "ok", NAMES[1]: "silent"}


async def test_a_reset_empties_every_cache(fleet: Fleet):
    """RP-6: the answer has the occupancy of each replica."""
    assert all(row["blocks_cached"] for row in (await fleet.http.get("/replicas")).json()["replicas"])
    answer = (await fleet.http.post("/reset_prefix_cache")).json()["replicas"]
    assert {name: one["occupancy"]["blocks_cached"] for name, one in answer.items()} == dict.fromkeys(NAMES, 0)
    assert not any(row["blocks_cached"] for row in (await fleet.http.get("/replicas")).json()["replicas"])


@pytest.mark.parametrize("prefix", ["", "/small"])
async def test_administrators_only(prefix: str, tmp_path):
    """RP-6: keys are those of the replicas, also under a prefix of routes; refusals are passed on as they are."""
    (tmp_path / "admin").write_text("admins")
    async with two_replicas(prefix, api_key="k", admin_key_file=str(tmp_path / "admin")) as fleet:
        for method, path in (("GET", "/replicas"), ("POST", "/reset_prefix_cache"), ("GET", "/prefix_cache")):
            url = prefix + path
            assert (await fleet.http.request(method, url)).status_code == 401, url
            refused = await fleet.http.request(method, url, headers=TENANT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_not_allowed"), url
            assert (await fleet.http.request(method, url, headers=ADMIN)).status_code == 200, url
        assert (await fleet.http.get(f"{prefix}/health")).status_code == 200, "open without a key"


@pytest.mark.parametrize(
    ("path", "answers", "status"),
    [
        ("/abort", {"a": (404, b"{}"), "b": (200, b"{}")}, 200),
        ("/abort", {"a": (404, b"{}"), "b": (503, b"{}")}, 404),
        ("/sleep", {"a": (200, b"{}"), "b": (503, b"{}")}, 503),
        ("/sleep", {"a": (200, b"{}"), "b": "no answer within 60 s"}, 502),
        ("/sleep", {"a": "no answer within 60 s"}, 503),
        ("/sleep", {}, 503),
    ],
)
async def test_statuses_of_several_answers(path: str, answers: dict, status: int):
    """RP-6: all replicas have to succeed; of an abort, one."""
    assert (await fixed(**answers).http.post(path)).status_code == status


def request(path: str) -> ForwardedRequest:
    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": path, "query_string": b""}
    return ForwardedRequest(scope | {"headers": [(b"host", b"127.0.0.1")]}, b"")
