"""Replicas behind the request router of Ray Serve: where requests go, and a replica that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from tests.ray.conftest import PATIENCE, REPLICAS, SETTINGS, processes

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
CHATS, TURNS = 8, 4
SHARE = 0.98  # of the tokens that the coordinator's fleet skips


def skipped(client: httpx.Client) -> int:
    """Prompt tokens that are skipped of a few conversations, in another order each turn."""
    said: dict[int, list[dict[str, str]]] = {chat: [] for chat in range(CHATS)}
    count = 0
    for turn in range(TURNS):
        for chat in random.Random(turn).sample(list(said), CHATS):
            question = f"Question {turn} of chat {chat}: " + f"what is {chat} times {turn}? " * 4
            said[chat].append({"role": "user", "content": question})
            body = {"messages": said[chat], "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            said[chat].append(answer["choices"][0]["message"])
            count += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.fixture
def coordinator() -> Iterator[httpx.Client]:
    """Client of a coordinator with two replicas of the same settings."""
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items() if name not in ("model", "num_cpus")
    ]
    command = [sys.executable, str(ROOT / "tools/run_coordinator.py"), "--launch", "2", "--port", "0", *flags]
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": folder}) as process,
    ):
        assert process.stdout is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("ready: "))
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE) as client:
                yield client
        finally:
            process.send_signal(signal.SIGINT)


def test_conversations_return_to_their_replica(run: Callable[..., httpx.Client], coordinator: httpx.Client):
    """RP-6: nearly as many tokens are skipped as with the coordinator, on the same requests."""
    expected = skipped(coordinator)
    assert expected > 0
    found = skipped(run(num_replicas=2))
    print(f"skipped: {found}, with the coordinator {expected}")
    assert found >= SHARE * expected


def test_a_replica_is_killed_during_a_stream(run: Callable[..., httpx.Client], nodes: Cluster):
    """RP-6: the stream ends with an error that says so, other requests are answered, and the replica comes back."""
    client = run(num_replicas=2)
    endless = {"prompt": [5] * 40, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=endless) as answer:
        lines = answer.iter_lines()
        next(lines)
        (busy,) = [one for one in processes(nodes, REPLICAS) if is_busy(one)]
        busy.kill()
        *_, last = [line for line in lines if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"
    for first in range(4):
        client.post("/v1/completions", json={"prompt": [first] * 40, "max_tokens": 2}).raise_for_status()
    deadline = time.monotonic() + PATIENCE
    while len(processes(nodes, REPLICAS)) < 2:
        assert time.monotonic() < deadline, "no replica takes its place"
        time.sleep(0.1)


def is_busy(process: psutil.Process) -> bool:
    """Return whether a process computes most of the time."""
    return process.cpu_percent(interval=0.5) > 30
