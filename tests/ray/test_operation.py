"""Operation of a fleet under Ray Serve: routes and metrics of all replicas, request ids in logs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.ray.conftest import FLEET, PATIENCE
from tests.unit_tests.support.source import ROOT

pytestmark = pytest.mark.ray

CHAT = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def client(run: Callable[..., httpx.Client]) -> httpx.Client:
    client = run(**FLEET)
    for first in range(8):
        client.post("/v1/completions", json={"prompt": [first] * 60, "max_tokens": 2}).raise_for_status()
    return client


def rows(client: httpx.Client) -> list[dict[str, object]]:
    """Rows of the status page."""
    return client.get("/replicas").raise_for_status().json()["replicas"]


@pytest.fixture
def frozen(client: httpx.Client, folder: Path) -> Iterator[psutil.Process]:
    """One of the replicas, which computes nothing meanwhile; machines may run other clusters, too."""
    raylets = [
        one for one in psutil.process_iter() if "raylet" in one.name() and str(folder) in " ".join(one.cmdline())
    ]
    workers = [one for raylet in raylets for one in raylet.children()]
    process = next(one for one in workers if "megatron_ext_replicas" in "".join(one.cmdline()))
    process.suspend()
    yield process
    process.resume()


def test_a_replica_that_hangs_costs_its_own_answer(client: httpx.Client, frozen: psutil.Process):
    """RP-6: the others are shown, and the fleet is healthy."""
    with ThreadPoolExecutor() as pool:  # each waits for the replica that hangs
        health, table = pool.map(client.get, ("/health", "/replicas"))
    assert health.json() == {"status": "ok", "replicas": {"ok": 1, "silent": 1}}
    found = table.json()["replicas"]
    assert sorted(row["status"] for row in found) == ["ok", "silent"]
    assert len({row["replica"] for row in found}) == 2


def test_metrics_of_all_replicas(client: httpx.Client):
    """RP-6: the one route has each sample of each replica, by the names of the status page."""
    names = {row["replica"] for row in rows(client)}
    families = list(text_string_to_metric_families(client.get("/metrics").raise_for_status().text))
    assert len({family.name for family in families}) == len(families)
    samples = {
        name: [
            (one.name, one.labels | {"replica": ""})
            for family in families
            for one in family.samples
            if one.labels["replica"] == name
        ]
        for name in names
    }
    first, *others = samples.values()
    assert len(first) > 100
    assert others
    assert all(one == first for one in others)
    assert len(first) * len(names) == sum(len(family.samples) for family in families)


def test_a_request_is_followed_through_the_logs(client: httpx.Client, folder: Path):
    """RP-6: the line of the ingress names the replica, and both lines have the request's id."""
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "follow-me"}).raise_for_status()
    assert answer.headers["x-request-id"] == "follow-me"
    deadline = time.monotonic() + PATIENCE
    lines: list[str] = []
    while len(lines) < 2:
        assert time.monotonic() < deadline, lines
        time.sleep(0.1)
        logs = [path.read_text("utf-8") for path in (folder / "session_latest/logs").glob("worker-*.err")]
        lines = [line for text in logs for line in text.splitlines() if line.endswith(" request=follow-me")]
    (ingress,) = [line for line in lines if "replica=" in line]
    (replica,) = [line for line in lines if answer.json()["id"] in line]
    assert re.search(r" replica=(\w+)", ingress)[1] in {row["replica"] for row in rows(client)}
    assert "prompt=" in replica


def test_ray_accepts_the_manifest():
    """RP-6: what the example for KubeRay hands to Ray Serve is of Ray's own schema."""
    from ray.serve.schema import ServeDeploySchema

    manifest = yaml.safe_load((ROOT / "examples/ray_serve/rayservice.yaml").read_text("utf-8"))
    content = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(content).applications
    assert application.model_dump(exclude_unset=True) == content["applications"][0]
