"""RP-5, RP-10: two coordinators before the same replicas route by each other's load, as the replicas report it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from megatron_ext.config import ServerConfig
from megatron_ext.coordinator.membership.member import Source
from megatron_ext.server.serving import Serving
from tests.unit_tests.support.fleet import FakeReplica, Fronted, coordinator, eventually
from tests.unit_tests.support.server import PATIENCE, LiveServer, tiny_engine


@dataclass(eq=False)
class Held:
    """A server whose engine computes nothing until it is released."""

    server: LiveServer
    _release: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        begun, requests = threading.Event(), self.server.serving.requests

        def wait() -> None:
            begun.set()
            assert self._release.wait(PATIENCE)

        self._waiting = asyncio.run_coroutine_threadsafe(requests.call(wait), self.server.loop)
        assert begun.wait(PATIENCE)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def living(self) -> int:
        return self.server.serving.requests.living

    def release(self) -> None:
        self._release.set()
        self._waiting.result(PATIENCE)


@pytest.fixture
def replicas() -> Iterator[list[Held]]:
    held = [Held(LiveServer(Serving(tiny_engine(), "tiny", ServerConfig(shutdown_timeout=5.0)))) for _ in range(2)]
    yield held
    for one in held:
        one.release()
        one.server.stop()


def before(*replicas: Held):
    fakes = [FakeReplica() for _ in replicas]
    for fake, one in zip(fakes, replicas, strict=True):
        fake.url = one.url
    return coordinator(*fakes, replica_timeout=PATIENCE)


def loads(front: Fronted) -> dict[str, int]:
    return {view.name: view.load for view in front.coordination.router.replicas()}


async def test_each_routes_by_the_load_of_the_other(replicas):
    """The engines stand still, so that all requests stay in flight until the end."""
    first, second = replicas
    tasks: list[asyncio.Task[httpx.Response]] = []

    async def send(sender: Fronted, length: int, chosen: Held) -> None:
        """Send a prompt that begins as no other, with 8 tokens to generate; it must reach this replica."""
        known = chosen.living
        prompt = [len(tasks) + 1] * length
        tasks.append(asyncio.ensure_future(sender.complete(prompt, max_tokens=8, temperature=0)))
        await eventually(lambda: first.living + second.living == len(tasks))
        assert chosen.living == known + 1
        for one in (front, other):
            await one.coordination.fleet.look_again()

    async with before(first) as front, before(first, second) as other:
        await send(front, 40, first)
        assert loads(other) == {first.url: 48, second.url: 0}
        await send(other, 20, second)
        await send(other, 21, second)
        assert loads(other) == {first.url: 48, second.url: 57}
        await send(other, 20, first)
        front.coordination.fleet.add(second.url, Source.FLAG)
        own = 9  # of its request when it had one replica, and no use for prompts
        await eventually(lambda: loads(front) == {first.url: own + 28, second.url: 57})
        await send(front, 10, first)
        assert loads(front) == {first.url: own + 28 + 18, second.url: 57}
        assert loads(other) == {first.url: 48 + 28 + 18, second.url: 57}
        for one in replicas:
            one.release()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 5
        for one in (front, other):
            await one.coordination.fleet.look_again()
            await one.check_idle()
