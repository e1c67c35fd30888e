"""Fleets under Ray Serve that grow, shrink and change while requests are under way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

from tests.ray.conftest import PATIENCE

pytestmark = pytest.mark.ray

DEPLOYMENT = "megatron_ext_replicas"
TIMEOUT = 10 * PATIENCE  # seconds that requests have when a replica stops: none is to need it


def tokens(first: int, count: int) -> list[int]:
    """A prompt that has nothing in common with those of other first tokens."""
    return [first + i % 7 for i in range(count)]


class Stream:
    """A stream of a completion.

    Args:
        client: Client of the application.
        prompt: Token ids.
        count: Number of generated tokens.
        fields: Other fields of the body.
    """

    def __init__(self, client: httpx.Client, prompt: list[int], count: int, **fields: object) -> None:
        self.count = count
        body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        self._open = client.stream("POST", "/v1/completions", json=body | options | fields)
        self._lines = iter(())

    def __enter__(self) -> Stream:
        answer = self._open.__enter__().raise_for_status()
        self._lines = (line for line in answer.iter_lines() if line)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)

    def read(self, count: int) -> None:
        """Wait for a number of events."""
        for _ in range(count):
            next(self._lines)

    def check_rest(self) -> None:
        """Read to the end, which must be that of a complete answer."""
        *_, usage, last = self._lines
        assert last == "data: [DONE]", last
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == self.count


def states() -> dict[str, int]:
    """Number of replicas by Ray's name of their state."""
    from ray import serve

    status = serve.status().applications["default"].deployments[DEPLOYMENT]
    return {str(getattr(state, "value", state)): count for state, count in status.replica_states.items()}


def pids() -> set[int]:
    """Processes of the replicas in this test's cluster."""
    workers = psutil.Process().children(recursive=True)
    return {one.pid for one in workers if DEPLOYMENT in "".join(command_line(one))}


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@contextmanager
def traffic(url: httpx.URL) -> Iterator[list[str]]:
    """Streams and other requests, one after the other in each of two threads; yields what went wrong."""
    is_over = threading.Event()
    wrong: list[str] = []
    counts = [0, 0]

    def work(number: int) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            while not is_over.is_set():
                try:
                    if number:
                        with Stream(client, tokens(1000 + counts[number], 40), 60) as stream:
                            stream.check_rest()
                    else:
                        body = {"prompt": tokens(2000 + counts[number], 40), "max_tokens": 4, "ignore_eos": True}
                        answer = client.post("/v1/completions", json=body).raise_for_status().json()
                        assert answer["usage"]["completion_tokens"] == 4
                    counts[number] += 1
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(counts))]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert all(counts)


@pytest.fixture(scope="module")
def fleet(run: Callable[..., httpx.Client]) -> httpx.Client:
    return run(num_replicas=2, shutdown_timeout=TIMEOUT)


def test_a_prompt_is_no_load_after_its_first_token(fleet: httpx.Client):
    """RP-2: one long prompt that is computed weighs less than two answers under way; events do not tell of it."""
    with ExitStack() as streams:

        def start(prompt: list[int], **fields: object) -> None:
            streams.enter_context(Stream(fleet, prompt, 1000, **fields)).read(5)

        start(tokens(100, 1500), enable_prefix_caching=False)
        start(tokens(200, 400))
        start([*tokens(200, 400), 7])
        assert fleet.get("/load").json()["server_load"] == 1


def test_an_update_loses_no_request(run: Callable[..., httpx.Client], fleet: httpx.Client):
    """RP-6: new replicas and ingresses take the place of the old ones; streams under way end on the old ones.

    Whichever of several ingresses gets a request, it knows where its prefix is.
    """
    before = pids()
    with traffic(fleet.base_url) as wrong:
        with Stream(fleet, tokens(300, 40), 600) as stream:
            stream.read(1)
            client = run(num_replicas=2, num_ingress_replicas=2, served_model_name="other", shutdown_timeout=TIMEOUT)
            stream.check_rest()
        wait_until(lambda: not before & pids(), "an old replica goes on")
    assert wrong == []
    assert client.get("/v1/models").json()["data"][0]["id"] == "other"
    assert cached(client) == 0
    wait_until(lambda: min(cached(client) for _ in range(8)) >= 192, "an ingress does not know the prefix")


def cached(client: httpx.Client) -> int:
    """Tokens of one prompt that are found cached."""
    body = {"prompt": tokens(400, 200), "max_tokens": 1}
    usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_fleet_grows_and_shrinks(run: Callable[..., httpx.Client]):
    """RP-6: waiting prompts make it grow; a replica that leaves ends its streams, and then stops at once."""
    client = run(
        num_replicas=1,
        max_replicas=2,
        waiting_tokens_per_replica=100,
        scaling_window=1.5,
        upscale_delay=0,
        downscale_delay=1,
        shutdown_timeout=TIMEOUT,
        inference_dynamic_batching_max_requests=8,
    )
    assert states() == {"RUNNING": 1}
    with ThreadPoolExecutor(12) as pool:
        bodies = [{"prompt": tokens(500 + 10 * i, 150), "max_tokens": 200, "ignore_eos": True} for i in range(12)]
        answers = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
        wait_until(lambda: states() == {"RUNNING": 2}, "it does not grow")
        assert [one.result().json()["usage"]["completion_tokens"] for one in answers] == [200] * 12
    with traffic(client.base_url) as wrong:
        with Stream(client, tokens(700, 40), 2500) as one, Stream(client, tokens(800, 40), 2500) as other:
            one.read(1)
            other.read(1)
            wait_until(lambda: "STOPPING" in states(), "it does not shrink")
            assert len(pids()) == 2
            one.check_rest()
            other.check_rest()
        wait_until(lambda: len(pids()) == 1, "the replica does not stop")
    assert wrong == []
    assert states() == {"RUNNING": 1}
