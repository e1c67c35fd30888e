"""Faults of an application of two replicas with two ranks each, under load, and what its clients see of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from megatron_ext import RequestParams, load_engine
from megatron_ext.ray_serve.forwarded import PromptRequest
from tests.ray.clients import PAUSE
from tests.ray.conftest import CPUS, INGRESS, PATIENCE, REPLICAS, SETTINGS, processes

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.ray

REPLICA_COUNT = RANKS = 2
CONTROLLER, RANK = "ServeController", "RankActor"
TIMEOUT = 9.0  # seconds after which a silent replica is replaced
STREAMS = [[7 * stream + 1] * 40 for stream in range(4)]
REQUESTS = [[11 * request + 2] * 40 for request in range(6)]
KNOWN = 200  # tokens of each stream that are compared
LATER = 10  # niceness of processes that compute, so that one that starts is not kept waiting
TOKENS = 12  # of each request


@dataclass
class Stream:
    """Stream that a client reads.

    Attributes:
        prompt: Its prompt.
        tokens: Token ids so far.
        error: Code of the error event that ended it; empty without one.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    error: str = ""


class Load:
    """Clients that read long streams, and clients that send one request after the other.

    Args:
        client: Client of the application.

    Attributes:
        streams: The streams.
        answers: First token of each request that has been answered, with its token ids or its error.
    """

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._stop = threading.Event()
        self.streams = [Stream(prompt) for prompt in STREAMS]
        self.answers: list[tuple[int, object]] = []
        self._readers = [threading.Thread(target=self._read, args=(one,)) for one in self.streams]
        self._askers = [threading.Thread(target=self._ask, args=(REQUESTS[first::2],)) for first in range(2)]
        self._started: list[threading.Thread] = []

    @contextlib.contextmanager
    def streaming(self) -> Iterator[None]:
        """Begin the streams; end them, and the requests, with the block."""
        self._start(self._readers)
        try:
            wait_for(lambda: all(one.tokens for one in self.streams), "a stream does not begin")
            yield
        finally:
            self._stop.set()
            for thread in self._started:
                thread.join()

    def ask(self) -> None:
        """Begin the requests."""
        self._start(self._askers)

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            thread.start()
        self._started += threads

    def _read(self, stream: Stream) -> None:
        with (
            contextlib.suppress(StopIteration),
            self._client.stream("POST", "/v1/completions", json=body(stream.prompt, 3000) | {"stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            while not self._stop.is_set() and not stream.error:
                event = next(lines).removeprefix("data: ")
                if event and event != "[DONE]":
                    content = json.loads(event)
                    stream.error = content.get("error", {}).get("code", "")
                    stream.tokens += content["choices"][0]["token_ids"] if not stream.error else []

    def _ask(self, prompts: Sequence[list[int]]) -> None:
        while not self._stop.is_set():
            for prompt in prompts:
                self._stop.wait(PAUSE)
                answer = self._client.post("/v1/completions", json=body(prompt, TOKENS))
                result = answer.json()["choices"][0]["token_ids"] if answer.is_success else answer.text
                self.answers.append((prompt[0], result))


def body(prompt: Sequence[int], tokens: int) -> dict[str, object]:
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": list(prompt), "max_tokens": tokens, **fixed}


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    """Tokens of one rank, by the first token of the prompt."""
    settings = {name: value for name, value in SETTINGS.items() if name not in ("model", "num_cpus")}
    params = RequestParams(num_tokens_to_generate=KNOWN, temperature=0, ignore_eos=True)
    prompts = [*STREAMS, *REQUESTS]
    with load_engine(**settings) as engine:
        records = engine.generate(prompts, params)
    return {prompt[0]: list(one.generated_tokens) for prompt, one in zip(prompts, records, strict=True)}


@pytest.fixture(scope="module")
def client(run: Callable[..., httpx.Client]) -> httpx.Client:
    return run(
        num_replicas=REPLICA_COUNT,
        tensor_model_parallel_size=RANKS,
        placement_group_strategy="STRICT_PACK",  # one replica on each node
        replica_timeout=TIMEOUT,
        shutdown_timeout=2,
    )


@contextlib.contextmanager
def streams_on_both(client: httpx.Client) -> Iterator[Load]:
    """Load with streams on both replicas; the proxies and ingresses may not know yet that the last one is there."""
    while True:
        load = Load(client)
        with load.streaming():
            rows = client.get("/replicas").json()["replicas"]
            if len(rows) == REPLICA_COUNT and all(row["in_flight"] for row in rows):
                yield load
                return


def busiest(nodes: Cluster, name: str) -> psutil.Process:
    """Process that computes most: it has streams."""
    found = processes(nodes, name)
    before = [sum(one.cpu_times()[:2]) for one in found]
    time.sleep(1)
    used = [sum(one.cpu_times()[:2]) - earlier for one, earlier in zip(found, before, strict=True)]
    return found[used.index(max(used))]


def kill(name: str) -> Callable[[Cluster], None]:
    return lambda nodes: busiest(nodes, name).kill()


def stop(name: str) -> Callable[[Cluster], None]:
    return lambda nodes: busiest(nodes, name).suspend()


def lose_a_node(nodes: Cluster) -> None:
    """Kill a node with a replica and without the ingress, and let another one join."""
    (ingress,) = processes(nodes, INGRESS)
    raylets = {node: node.all_processes["raylet"][0].process.pid for node in nodes.worker_nodes}
    nodes.remove_node(next(node for node, raylet in raylets.items() if raylet != ingress.ppid()), allow_graceful=False)
    nodes.add_node(num_cpus=CPUS)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param(kill(REPLICAS), "replica_lost", id="replica-killed"),
        pytest.param(kill(RANK), "replica_lost", id="rank-killed"),
        pytest.param(stop(REPLICAS), "replica_lost", id="replica-hangs"),
        pytest.param(stop(RANK), "replica_lost", id="rank-hangs"),
        pytest.param(lose_a_node, "replica_lost", id="node-lost"),
        pytest.param(kill(CONTROLLER), "", id="controller-killed"),
        pytest.param(kill(INGRESS), "replica_lost", id="ingress-killed"),
    ],
)
def test_faults(
    fault: Callable[[Cluster], None],
    error: str,
    client: httpx.Client,
    nodes: Cluster,
    expected: dict[int, list[int]],
):
    """RP-6: requests that have not begun run elsewhere, begun streams end with an error, and capacity comes back."""
    wait_for(lambda: replicas_that_answer() == REPLICA_COUNT, "an earlier fault lasts")
    names = (REPLICAS, RANK, INGRESS, CONTROLLER)
    before = {one.pid for name in names for one in processes(nodes, name)}
    with streams_on_both(client) as load:
        load.ask()
        for one in (*processes(nodes, REPLICAS), *processes(nodes, RANK)):
            one.nice(LATER)
        fault(nodes)
        wait_for(lambda: not error or any(one.error for one in load.streams), "no stream ends")
        wait_for(lambda: {one.pid for name in names for one in processes(nodes, name)} != before, "nothing is replaced")
        wait_for(lambda: replicas_that_answer() == REPLICA_COUNT, "the capacity does not come back")
        begun = [len(one.tokens) for one in load.streams]
        answered = len(load.answers)
        wait_for(lambda: len(load.answers) >= answered + len(REQUESTS), "requests are not answered")
        going_on = [(one, count) for one, count in zip(load.streams, begun, strict=True) if not one.error]
        wait_for(lambda: all(len(one.tokens) > count for one, count in going_on), "a stream does not go on")
    assert {one.error for one in load.streams} <= {error, ""}
    for one in load.streams:
        assert one.tokens[:KNOWN] == expected[one.prompt[0]][: len(one.tokens)]
    assert [answer for first, answer in load.answers if answer != expected[first][:TOKENS]] == []
    assert len(processes(nodes, RANK)) == REPLICA_COUNT * (RANKS - 1)


async def test_the_loss_of_a_caller_is_seen(nodes: Cluster):
    """RP-6: a replica learns that an ingress is lost while requests of it run."""
    import ray

    from megatron_ext.ray_serve.deployment import CallerWatch

    @ray.remote(num_cpus=0)
    class Caller:
        pass

    caller, callers = Caller.remote(), CallerWatch()
    with callers.answering(caller) as first, callers.answering(caller) as second:
        await caller.__ray_ready__.remote()
        assert not first.is_set()
        ray.kill(caller)
        await asyncio.wait_for(asyncio.gather(first.wait(), second.wait()), PATIENCE)


def replicas_that_answer() -> int:
    """Number of replicas that tokenize a prompt, each of which Ray asks; 0 while Ray asks one that is lost."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    replicas = serve.get_deployment_handle("megatron_ext_replicas", "default")
    request = PromptRequest("/v1/completions", b"", json.dumps(body([1, 2, 3], 1)).encode())
    try:
        return len(replicas.broadcast("read_prompt", request).results(timeout_s=5))
    except (RayError, RayServeException, TimeoutError):
        return 0


def wait_for(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
