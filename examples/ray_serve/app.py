"""Two replicas of run_server.py under Ray Serve, requests sent to where their prefix is.

    pip install "ray[serve]" httpx
    python -m examples.ray_serve.app            # a few conversations, then what was skipped
    python -m examples.ray_serve.app --serve    # until Ctrl-C, at http://127.0.0.1:8000/v1

A replica is an actor with a server process of its own (with `torch.distributed.run` in front of the command it may be a
world of several ranks); Ray starts, watches and restarts it. `--router power_of_two`, for comparison, is Ray's default:
the shorter queue of two.
"""

# Without `from __future__ import annotations`: Ray sends what is in this module elsewhere, where FastAPI reads them.

import argparse
import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import ray
from fastapi import FastAPI, Request
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response, StreamingResponse

from examples.ray_serve.prefix_router import PrefixRouter

ROOT = Path(__file__).parents[2]
SMALL = """
--inference-dynamic-batching-block-size 16 --inference-dynamic-batching-block-count 400
--inference-dynamic-batching-prefix-caching-mamba-slots 64 --inference-dynamic-batching-max-requests 16
""".split()
CHATS, TURNS = 8, 3
PATIENCE = 120.0  # seconds

api = FastAPI()


class Replica:
    """A server process, and calls of it.

    Args:
        flags: Of `tools/run_server.py`.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        command = [sys.executable, str(ROOT / "tools/run_server.py"), *flags, "--port", "0"]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        assert self._process.stdout is not None, "it is a pipe"
        lines = iter(self._process.stdout.readline, "")
        ready = next((line for line in lines if line.startswith("ready: ")), None)
        if ready is None:
            raise RuntimeError(f"the server ended with code {self._process.wait()}")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        self._http = httpx.AsyncClient(base_url=ready.split()[1], timeout=PATIENCE)

    async def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        (await self._http.get("/health")).raise_for_status()

    async def ask(self, path: str, body: bytes) -> AsyncIterator[tuple[int, str] | bytes]:
        """Status and type of an answer, and then its parts."""
        headers = {"content-type": "application/json"}
        async with self._http.stream("POST", path, content=body, headers=headers) as answer:
            yield answer.status_code, answer.headers.get("content-type", "application/json")
            async for part in answer.aiter_raw():
                yield part

    def __del__(self) -> None:
        self._process.terminate()


class Front:
    """OpenAI's routes before the replicas.

    Args:
        replica: Their handle; the router is beside it.
    """

    def __init__(self, replica: DeploymentHandle) -> None:
        self._replica = replica.options(stream=True)

    @api.post("/v1/{rest:path}")
    async def generate(self, rest: str, request: Request) -> Response:
        """Pass a request on."""
        parts = self._replica.ask.remote(f"/v1/{rest}", await request.body())
        status, kind = await anext(parts)
        return StreamingResponse(parts, status, media_type=kind)


def application(router: str, replicas: int = 2) -> serve.Application:
    """Return the application for `serve.run`."""
    config = RequestRouterConfig(request_router_class=PrefixRouter)
    options = {"request_router_config": config} if router == "prefix" else {}
    replica = serve.deployment(num_replicas=replicas, max_ongoing_requests=64, **options)(Replica)
    front = serve.deployment(ray_actor_options={"num_cpus": 0})(serve.ingress(api)(Front))  # replicas compute
    return front.bind(replica.bind(SMALL))


async def converse(url: str) -> tuple[int, int]:
    """A few conversations in an order of its own each turn; prompt tokens of all, and those that were skipped."""
    prompt = cached = 0
    said: dict[int, list[dict[str, str]]] = {chat: [] for chat in range(CHATS)}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        for turn in range(TURNS):
            for chat in random.Random(turn).sample(list(said), CHATS):
                question = f"Question {turn} of chat {chat}: " + f"what is {chat} times {turn}? " * 4
                said[chat].append({"role": "user", "content": question})
                body = {"messages": said[chat], "max_tokens": 8, "temperature": 0}
                answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                said[chat].append(answer["choices"][0]["message"])
                prompt += answer["usage"]["prompt_tokens"]
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return prompt, cached


def main() -> None:
    """Serve, and talk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", choices=("prefix", "power_of_two"), default="prefix")
    parser.add_argument("--serve", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port})
    serve.run(application(given.router), blocking=given.serve)
    prompt, cached = asyncio.run(converse(f"http://127.0.0.1:{given.port}"))
    print(f"{given.router}: {cached} of {prompt} prompt tokens skipped, {100 * cached / prompt:.1f} %")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
