"""Replicas that compute nothing, on the event loop of the test, and a coordinator before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import h11
import httpx

from megatron_ext.config.coordinator import CoordinatorConfig
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.coordination import Coordination
from megatron_ext.coordinator.launcher.launch import Launcher
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.coordinator.run import build_coordinator
from megatron_ext.server.http.listening import bind

PATIENCE = 60.0  # seconds until a test gives up; nothing is measured
LAUNCH_PATIENCE = 120.0  # for a replica that loads a model
BLOCK = 4
EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(3)] + [b"data: [DONE]\n\n"]
HEALTHY_STREAM = b"".join(EVENTS).decode()


@dataclass(eq=False)
class Exchange:
    """Request to a fake replica."""

    method: str
    path: str
    headers: dict[str, str]
    body: object
    connection: h11.Connection
    writer: asyncio.StreamWriter

    def head(self, status: int, kind: str = "application/json", **headers: str) -> None:
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        response = h11.Response(status_code=status, headers=[("content-type", kind), *named])
        self.writer.write(self.connection.send(response))

    def data(self, data: bytes) -> None:
        self.writer.write(self.connection.send(h11.Data(data=data)))

    def end(self) -> None:
        self.writer.write(self.connection.send(h11.EndOfMessage()))

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        self.head(status, **headers)
        self.data(json.dumps(content).encode())
        self.end()

    def die(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[["FakeReplica", Exchange], Awaitable[None]]


async def answers(fake: FakeReplica, exchange: Exchange) -> None:
    """Answer at once: whole or as a stream."""
    if exchange.body.get("stream"):
        exchange.head(200, "text/event-stream")
        for event in EVENTS:
            exchange.data(event)
        exchange.end()
    else:
        exchange.answer({"by": fake.name, "usage": {"completion_tokens": 3}})


def error(status: int, code: str | None = None, **headers: str) -> Behaviour:
    async def behave(fake: FakeReplica, exchange: Exchange) -> None:
        body = {"error": {"message": f"{fake.name} refuses", "type": "t", "param": None, "code": code}}
        exchange.answer(body, status, **headers)

    return behave


async def dies(fake: FakeReplica, exchange: Exchange) -> None:
    exchange.die()


def breaks_off(after: int, part: bytes = b"data: {") -> Behaviour:
    """A stream that dies within an event."""

    async def behave(fake: FakeReplica, exchange: Exchange) -> None:
        exchange.head(200, "text/event-stream")
        for event in EVENTS[:after]:
            exchange.data(event)
        exchange.data(part)
        await exchange.writer.drain()
        await asyncio.sleep(0.02)
        exchange.die()

    return behave


@dataclass(eq=False)
class FakeReplica:
    """Fake replica that counts requests and behaves as configured."""

    name: str = "fake"
    behave: Behaviour = answers
    beat: dict[str, object] = field(default_factory=dict)
    is_frozen: bool = False
    requests: list[Exchange] = field(default_factory=list)  # those that generate
    others: list[Exchange] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)  # of other paths; 200 unless said
    status_body: bytes | None = None  # answer to GET /replica in place of `beat`
    other_body: bytes | None = None  # answer to other calls that do not generate
    answers_with: dict[str, object] = field(default_factory=dict)  # contents of answers, by path
    on_call: dict[str, Callable[[], object]] = field(default_factory=dict)  # called before the answer, by path
    holds: dict[str, asyncio.Event] = field(default_factory=dict)  # awaited before the answer, by path
    left: int = 0  # clients that went before the answer
    url: str = ""

    def __post_init__(self) -> None:
        plain = {
            "instance": uuid.uuid4().hex,
            "model": "fake",
            "configuration": "c",
            "tokenizer": "t",
            "weights": "w",
            "status": "ok",
            "has_keys": False,
            "block_size": BLOCK,
            "blocks": 64,
            "has_states": False,
            "capacity": 8,
            "living": 0,
            "others": {"requests": 0, "prompt_tokens": 0, "output_tokens": 0},
            "steps": 0,
            "kv_events": [],
            "prompt_tokens": {"skipped": 5, "computed": 7},
        }
        self.beat = plain | self.beat
        self._tasks: set[asyncio.Task] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> FakeReplica:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        """Close all connections abruptly, as if killed."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def restart(self) -> None:
        """Another process at the same address."""
        self.beat["instance"] = uuid.uuid4().hex

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, h11.LocalProtocolError):
                await self._exchange(reader, writer)
        finally:
            self._tasks.discard(asyncio.current_task())
            self._writers.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, body = h11.Connection(h11.SERVER), b""
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                return
        headers = {name.decode(): value.decode() for name, value in request.headers}
        path = request.target.decode()
        content = json.loads(body) if body else None
        exchange = Exchange(request.method.decode(), path, headers, content, connection, writer)
        working = asyncio.ensure_future(self._behave(exchange))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            self.left += not working.done()
            if working.done():
                await working
                await writer.drain()
        finally:
            working.cancel()
            leaving.cancel()

    async def _behave(self, exchange: Exchange) -> None:
        is_generation = exchange.path.startswith("/v1/c") or exchange.path == "/v1/messages"
        (self.requests if is_generation else self.others).append(exchange)
        while self.is_frozen:
            await asyncio.sleep(0.01)
        if is_generation:
            await self.behave(self, exchange)
        elif exchange.path == "/replica" and self.status_body is not None:
            exchange.head(200)
            exchange.data(self.status_body)
            exchange.end()
        elif exchange.path == "/replica":
            exchange.answer(self.beat)
        elif self.other_body is not None:
            exchange.head(200, "text/html")
            exchange.data(self.other_body)
            exchange.end()
        elif exchange.path == "/tokenize":
            text = json.dumps(exchange.body.get("messages", exchange.body.get("prompt")))
            exchange.answer({"tokens": [ord(one) for one in text]})
        else:
            if exchange.path in self.holds:
                await self.holds[exchange.path].wait()
            self.on_call.get(exchange.path, lambda: None)()
            status = self.statuses.get(exchange.path, 200)
            content = {"by": self.name} if status == 200 else {"error": {"message": "no", "code": "c"}}
            exchange.answer(self.answers_with.get(exchange.path, content), status)


@dataclass(eq=False)
class Fronted:
    """A coordinator that listens, and a client of it."""

    coordination: Coordination
    http: httpx.AsyncClient
    url: str

    async def complete(self, prompt: object = "hello world", **fields: object) -> httpx.Response:
        headers = fields.pop("headers", {})
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)

    async def stream(self, prompt: object = "hello world") -> str:
        return (await self.complete(prompt, stream=True)).text

    def status(self, fake: FakeReplica) -> Status:
        return self.coordination.fleet.members[fake.url].status

    async def until(self, fake: FakeReplica, *statuses: Status) -> None:
        await eventually(lambda: self.status(fake) in statuses)

    async def check_idle(self) -> None:
        """Check that nothing is in flight, and that the router knows it."""
        fleet = self.coordination.fleet
        await eventually(lambda: not any(member.calls for member in fleet.members.values()))
        assert not fleet.in_flight
        fleet.router.check()
        assert all(view.load == 0 and view.in_flight == 0 for view in fleet.router.replicas())


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come true")


@contextlib.asynccontextmanager
async def coordinator(
    *fakes: FakeReplica,
    policy: str = "least_computed",
    alpha: float = 0.5,
    launcher: Launcher | None = None,
    **settings: object,
) -> AsyncIterator[Fronted]:
    """A coordinator before these, all of which have joined."""
    given = {"replica_timeout": 5.0, "replica": tuple(fake.url for fake in fakes), "access_log": False} | settings
    config = CoordinatorConfig(routing=RoutingConfig(policy, alpha), **given)
    coordination = Coordination(config)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = build_coordinator(coordination, ready.set_result, launcher)
    patience = PATIENCE if launcher is None else LAUNCH_PATIENCE
    serving = asyncio.ensure_future(server.serve(sockets=[bind("127.0.0.1", 0)]))
    await asyncio.wait((serving, ready), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    url = ready.result()
    try:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            yield Fronted(coordination, client, url)
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE)


@contextlib.asynccontextmanager
async def fleet(count: int = 2, **settings: object) -> AsyncIterator[tuple[Fronted, list[FakeReplica]]]:
    """Start fake replicas, and a coordinator before them."""
    fakes = [await FakeReplica(name=f"fake {number}").start() for number in range(count)]
    try:
        async with coordinator(*fakes, **settings) as front:
            yield front, fakes
    finally:
        for fake in fakes:
            await fake.stop()


def generations(fakes) -> list[int]:
    return [len(fake.requests) for fake in fakes]


async def first_choice(front, fakes):
    """The replica that a request goes to, and the other one; both have been asked for nothing."""
    answer = (await front.complete()).json()["by"]
    chosen = next(fake for fake in fakes if fake.name == answer)
    chosen.requests.clear()
    return chosen, next(fake for fake in fakes if fake is not chosen)
