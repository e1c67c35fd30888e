"""Fake replicas whose weights have versions, and what their requests see of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx

from tests.unit_tests.support.fleet import Exchange, FakeReplica, Fronted, coordinator, error

PATH = "/update_weights_from_disk"


@dataclass(eq=False)
class Updatable:
    """A fake replica that can get new weights; answers name the version that they began with.

    Attributes:
        release: Requests end when it is set.
        running: Requests in flight.
        mixed: Requests during which the weights changed.
        fails_with: Status of requests in place of an answer.
        write_fails: What goes wrong with an update: a status, "dies", "lies" (nothing changes), or "other weights".
        is_slow: Whether updates do not end.
        on_write: Called when the weights are written.
    """

    fake: FakeReplica
    release: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    mixed: int = 0
    fails_with: int | None = None
    write_fails: int | str | None = None
    is_slow: bool = False
    on_write: object = None

    def __post_init__(self) -> None:
        self.release.set()
        self.fake.beat |= {"weights": "old", "weights_version": 0}
        self.fake.behave = self._answer
        self.fake.on_call[PATH] = self._update

    async def start(self) -> Updatable:
        await self.fake.start()
        return self

    @property
    def version(self) -> int:
        return self.fake.beat["weights_version"]

    @property
    def calls(self) -> list[Exchange]:
        return [one for one in self.fake.others if one.path == PATH]

    @property
    def is_asked(self) -> bool:
        return bool(self.calls)

    def write(self, version: int, path: str = "new") -> None:
        self.fake.beat |= {"weights": path, "weights_version": version}

    def _update(self) -> None:
        if self.on_write is not None:
            self.on_write()
        body, fails = self.calls[-1].body, self.write_fails
        self.fake.statuses[PATH] = fails if isinstance(fails, int) else 200
        if self.is_slow:
            self.fake.beat["is_updating"] = True
            raise asyncio.CancelledError
        if fails == "dies":
            self.calls[-1].die()
        elif fails in (None, "other weights"):
            self.write(body["weights_version"], "wrong" if fails else body["model_path"])

    async def _answer(self, fake: FakeReplica, exchange: Exchange) -> None:
        version = self.version
        self.running += 1
        try:
            await self.release.wait()
            if self.fails_with is not None:
                await error(self.fails_with)(fake, exchange)
                return
        finally:
            self.running -= 1
        self.mixed += self.version != version
        exchange.answer({"by": fake.name, "version": version, "usage": {"completion_tokens": 3}})


@contextlib.asynccontextmanager
async def updatable_fleet(count: int, **settings: object) -> AsyncIterator[tuple[Fronted, list[Updatable]]]:
    """Start fake replicas with versions of weights, and a coordinator before them."""
    replicas = [await Updatable(FakeReplica(name=f"fake {number}")).start() for number in range(count)]
    try:
        async with coordinator(*(one.fake for one in replicas), **{"replica_timeout": 2.0} | settings) as front:
            yield front, replicas
    finally:
        for one in replicas:
            await one.fake.stop()


async def update(front: Fronted, **fields: object) -> httpx.Response:
    """Call the coordinator's route with the weights "new"."""
    return await front.http.post(PATH, json={"model_path": "new", **fields})
