"""SE-8, RP-4, RP-8: whatever a replica answers is validated and bounded; it costs that replica only."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from arguments import parse_coordinator_arguments
from megatron_ext.config.coordinator import CoordinatorConfig
from megatron_ext.config.fleet_limits import (
    EVENT_BYTES,
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_COUNT,
    MAX_EVENT_SOURCES,
    MAX_NAME,
    PARSED_BYTES,
    STATUS_BYTES,
)
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.coordination import Coordination
from megatron_ext.coordinator.forwarding import whole_events
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.heartbeat import BadHeartbeat, EventPlaces, Heartbeat
from megatron_ext.coordinator.membership.member import Member, Source, Status
from megatron_ext.coordinator.replica_client import Address, BadAnswer, Call, CallFailed, CompleteAnswer
from megatron_ext.coordinator.supervision import Supervisor, within
from megatron_ext.errors import ConfigError
from megatron_ext.routing.router import Router
from tests.unit_tests.support.fleet import PATIENCE, FakeReplica, answers, coordinator, error, eventually, fleet

HOST = "10.0.0.5"
DEEP = b"[" * 200_000 + b"]" * 200_000


def beat(**fields: object) -> dict[str, object]:
    return FakeReplica(beat=fields).beat


def parsed(places: EventPlaces | None = None, **fields: object) -> Heartbeat:
    return Heartbeat.of(beat(**fields), places or EventPlaces(HOST))


def raw(body: bytes, kind: str = "application/json"):
    """Behaviour of a replica that answers with these bytes."""

    async def behave(fake: FakeReplica, exchange) -> None:
        exchange.head(200, kind)
        exchange.data(body)
        exchange.end()

    return behave


class TestHeartbeat:
    @pytest.mark.parametrize("field", ["instance", "model", "status", "has_keys", "block_size", "blocks", "capacity"])
    @pytest.mark.parametrize("value", [None, float("inf"), float("nan"), -1, 10**30, 1.5, [], {}, "", "x" * 513])
    def test_each_field_has_a_type_and_bounds(self, field, value):
        with pytest.raises(BadHeartbeat, match=field) as refused:
            parsed(**{field: value})
        assert len(str(refused.value)) < 500

    @pytest.mark.parametrize(
        ("field", "most"),
        [("block_size", MAX_BLOCK_SIZE), ("blocks", MAX_BLOCKS), ("living", MAX_COUNT), ("steps", MAX_COUNT)],
    )
    def test_numbers_at_their_bounds(self, field, most):
        assert getattr(parsed(**{field: most}), field) == most
        for wrong in (most + 1, True, "1", float(most)):
            with pytest.raises(BadHeartbeat, match=field):
                parsed(**{field: wrong})

    def test_caches_and_their_blocks_at_their_bounds(self):
        """RP-8: counts that a replica reports bound the files and the memory that the coordinator uses for it."""

        def caches(count: int, blocks: int = 1) -> Heartbeat:
            sources = [{"endpoint": f"tcp://{HOST}:{port}", "topic": ""} for port in range(1, count + 1)]
            return parsed(kv_events=sources, blocks=blocks)

        most = MAX_BLOCKS // MAX_EVENT_SOURCES
        assert len(caches(MAX_EVENT_SOURCES, most).events) == MAX_EVENT_SOURCES == 64
        with pytest.raises(BadHeartbeat, match="kv_events must be a list of at most 64"):
            caches(MAX_EVENT_SOURCES + 1)
        with pytest.raises(BadHeartbeat, match=f"blocks is .* {most}"):
            caches(MAX_EVENT_SOURCES, most + 1)

    def test_names_at_their_bounds(self):
        assert parsed(model="x" * MAX_NAME).model == "x" * MAX_NAME

    @pytest.mark.parametrize("tokens", [5, [], {"skipped": 1}, {"skipped": -1, "computed": 1}])
    def test_counts_of_tokens(self, tokens):
        with pytest.raises(BadHeartbeat, match="GET /replica does not return a replica's answer"):
            parsed(prompt_tokens=tokens)
        assert parsed(prompt_tokens=None).skipped is None

    @pytest.mark.parametrize("content", [None, [], "x", 5])
    def test_refuses_anything_but_an_object(self, content):
        with pytest.raises(BadHeartbeat, match="must be an object"):
            Heartbeat.of(content, EventPlaces(HOST))


class TestEventPlaces:
    def test_wildcards_are_the_replicas_host(self):
        assert EventPlaces(HOST).address("tcp://*:5557") == f"tcp://{HOST}:5557"
        assert EventPlaces("::1").address("tcp://0.0.0.0:5557") == "tcp://[::1]:5557"
        assert EventPlaces("::1").address("tcp://[::1]:5557") == "tcp://[::1]:5557"
        assert EventPlaces("localhost").address("tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5557"

    @pytest.mark.parametrize(
        "address",
        [
            *("tcp://nohost", "tcp://10.0.0.6:5557", "tcp://127.0.0.1:5557", "tcp://*:0", "inproc://x", "", 5, None),
            *("ipc:///run/secret", "ipc:///made/../run/secret", "tcp://*:5557" + "0" * 600),
        ],
    )
    def test_other_places_are_refused(self, address):
        with pytest.raises(BadHeartbeat):
            EventPlaces(HOST, sockets=Path("/made")).address(address)

    @pytest.mark.parametrize(
        "address", ["ipc:///run/secret", "ipc:///made/../run/secret", "ipc:///made", "ipc:///made/" + "x" * 107]
    )
    def test_sockets_elsewhere_are_refused(self, address):
        with pytest.raises(BadHeartbeat):
            EventPlaces("127.0.0.1", sockets=Path("/made")).address(address)

    def test_a_setting_allows_others(self):
        allowed = CoordinatorConfig(
            replica=("http://a",), allowed_event_sources=("10.0.0.6", "[::1]", "ipc:///run/events")
        ).allowed_event_sources
        places = EventPlaces("127.0.0.1", allowed)
        for address in ("tcp://10.0.0.6:1", "tcp://[::1]:1", "ipc:///run/events/a"):
            assert places.address(address) == address
        for address in ("tcp://10.0.0.7:1", "ipc:///run/other"):
            with pytest.raises(BadHeartbeat):
                places.address(address)
        assert EventPlaces(HOST, ("*",)).address("tcp://10.0.0.7:1") == "tcp://10.0.0.7:1"

    def test_sockets_of_a_launched_replica(self):
        places = EventPlaces("127.0.0.1", sockets=Path("/made"))
        assert places.address("ipc:///made/events") == "ipc:///made/events"
        with pytest.raises(BadHeartbeat):
            EventPlaces(HOST, ("ipc:///made",)).address("ipc:///made/events")  # a path means nothing elsewhere

    @pytest.mark.parametrize("place", ["tcp://a:1", "a:1", "ipc://relative", "ipc:///", "ipc:///a/../b", ""])
    def test_mistakes_in_the_setting(self, place):
        with pytest.raises(ConfigError, match="is no place of KV events"):
            parse_coordinator_arguments(["--replica", "http://a", "--allowed-event-sources", place])

    @pytest.mark.parametrize("name", ["endpoint", "replay", "states", "states_replay"])
    @pytest.mark.parametrize("endpoint", ["tcp://nohost", "tcp://example.org:1", "ipc:///nowhere/events"])
    async def test_a_replica_with_other_places_serves_without_events(self, endpoint, name, caplog):
        source = {"endpoint": "tcp://127.0.0.1:1", "replay": None, "topic": "t"} | {name: endpoint}
        fake = await FakeReplica(beat={"kv_events": [source]}).start()
        async with coordinator(fake) as front:
            assert front.status(fake) is Status.READY
            assert (await front.complete()).status_code == 200
            (row,) = front.coordination.rows()
            assert not row["has_events"]
            assert endpoint in row["problem"]
            assert caplog.text.count("its KV events are not read") == 1
        await fake.stop()

    async def test_sockets_are_read_where_they_were_made(self):
        """SE-8: a launched replica has events over ipc:// in its own directory."""
        source = {"endpoint": "ipc:///made/events", "replay": None, "topic": "t"}
        coordination = Coordination(CoordinatorConfig(replica=("http://127.0.0.1:1",)))
        member = Member("http://127.0.0.1:1", Source.LAUNCH, Path("/made"))
        places = EventPlaces(member.address.host, (), member.sockets)
        member.beat = Heartbeat.of(beat(kv_events=[source]), places)
        coordination.fleet.members[member.url] = member
        coordination.router.join(member.url, 4)
        coordination.fleet.on_join(member)
        assert coordination.rows()[0]["has_events"]
        coordination.fleet.on_leave(member)


class TestOneReplicasNonsense:
    @pytest.mark.parametrize(
        "body",
        [
            json.dumps(beat(living=float("inf"))).encode(),
            json.dumps(beat(block_size=10**30)).encode(),
            DEEP,
            b'{"instance": ' + DEEP + b"}",
            b"1" * 5000,
            b"\xff",
            b" " * (STATUS_BYTES + 1),
        ],
        ids=["infinity", "block size", "nested", "nested field", "digits", "not UTF-8", "too long"],
    )
    async def test_it_is_refused_counted_and_fails_nothing(self, body, caplog):
        """The replica is avoided as one that does not answer, is dead after the time-out, and may come back."""
        async with fleet(2, replica_timeout=0.6) as (front, fakes):
            odd, good = fakes
            odd.status_body = body
            await front.until(odd, Status.SILENT)
            for number in range(4):
                assert (await front.complete([number] * 9)).json()["by"] == good.name
            await front.until(odd, Status.DEAD)
            assert "replica" in caplog.text
            metrics = (await front.http.get("/metrics")).text
            assert f'answers_refused_total{{replica="{good.url}"}} 0.0' in metrics
            assert f'answers_refused_total{{replica="{odd.url}"}} 0.0' not in metrics
            assert not front.coordination.supervisor.restarts
            odd.status_body = None
            await front.until(odd, Status.READY)

    async def test_an_answer_of_the_longest_size_is_read(self):
        async with fleet(1) as (front, fakes):
            text = json.dumps(fakes[0].beat).encode()
            fakes[0].status_body = text + b" " * (STATUS_BYTES - len(text))
            front.coordination.fleet.members[fakes[0].url].probed.clear()
            await front.coordination.fleet.first_look()
            assert front.status(fakes[0]) is Status.READY

    @pytest.mark.parametrize("behave", [raw(b"<html>", "text/html"), raw(b""), raw(DEEP), raw(b'{"a":')])
    async def test_an_answer_that_is_not_json(self, behave):
        """Another replica is asked; without one the client gets a 502."""
        async with fleet(2) as (front, fakes):
            for fake in fakes:
                fake.behave = behave
            answer = await front.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_replica_answer")
            assert [len(fake.requests) for fake in fakes] == [1, 1]
            fakes[1].behave = answers
            assert (await front.complete()).json()["by"] == fakes[1].name
            assert all(front.status(fake) is Status.READY for fake in fakes), "they are alive"
            await front.check_idle()

    @pytest.mark.parametrize("is_object", [False, True], ids=["list", "object"])
    def test_a_long_answer_is_not_parsed(self, monkeypatch, is_object):
        """RP-8: parsing a list of 100 million lists would take minutes, in which nothing else is answered."""
        monkeypatch.delattr("megatron_ext.coordinator.replica_client.json")
        body = b"[[]" + b",[]" * (PARSED_BYTES // 3) + b"]"
        answer = CompleteAnswer(200, (), b' {"a":' + body + b"} \n" if is_object else body)
        assert answer.is_json is is_object

    async def test_other_routes_answer_502(self):
        async with fleet(1) as (front, fakes):
            fakes[0].other_body = b"<html>"
            assert (await front.http.get("/v1/models")).status_code == 502
            assert (await front.http.post("/reset_prefix_cache")).status_code == 502

    async def test_a_huge_count_of_tokens(self):
        """An answer's usage neither fails the request nor moves the expected lengths of others."""
        async with fleet(1) as (front, fakes):
            for digits in (17, 5000):
                fakes[0].behave = raw(b'{"usage": {"completion_tokens": %s}}' % (b"9" * digits))
                answer = await front.complete(max_tokens=3)
                assert answer.status_code == (200 if digits == 17 else 502)  # Python's JSON has a limit of digits, too
            assert front.coordination.router._mean_generated < 256

    async def test_an_event_without_an_end(self, monkeypatch):
        monkeypatch.setattr("megatron_ext.coordinator.forwarding.EVENT_BYTES", 1000)

        async def endless(fake, exchange):
            exchange.head(200, "text/event-stream")
            while True:
                exchange.data(b"data: x" * 100)
                await exchange.writer.drain()
                await asyncio.sleep(0)

        async with fleet(2) as (front, fakes):
            for fake in fakes:
                fake.behave = endless
            answer = await asyncio.wait_for(front.complete(stream=True), PATIENCE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_replica_answer")
            await front.check_idle()


class TestBounds:
    async def test_informational_responses_without_end(self):
        """RP-4: bytes arrive all the time, so that the request would be waited for for ever."""

        async def informs(fake: FakeReplica, exchange) -> None:
            while True:
                exchange.writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
                await exchange.writer.drain()

        async with fleet(2) as (front, fakes):
            fakes[0].behave = informs
            answers_seen = [await asyncio.wait_for(front.complete([number] * 9), PATIENCE) for number in range(4)]
            assert {answer.json()["by"] for answer in answers_seen} == {fakes[1].name}
            fakes[1].behave = informs
            answer = await asyncio.wait_for(front.complete(), PATIENCE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_replica_answer")
            await front.check_idle()

    async def test_events_at_the_bound_and_above(self):
        async def stream(size: int):
            for at in range(0, size, 1 << 16):
                yield b"x" * min(1 << 16, size - at)
            yield b"\n\n"

        (event,) = [part async for part in whole_events(stream(EVENT_BYTES))]
        assert len(event) == EVENT_BYTES + 2
        with pytest.raises(BadAnswer, match=f"more than {EVENT_BYTES} bytes"):
            [part async for part in whole_events(stream(EVENT_BYTES + 1))]

    @pytest.mark.parametrize("size", [1000, 1001])
    async def test_bodies_at_the_bound_and_above(self, size):
        fake = await FakeReplica(behave=raw(b"x" * size)).start()
        call = Call(Address.of(fake.url))
        await call.start("POST", "/v1/completions", body=b"{}", patience=PATIENCE)
        if size > 1000:
            with pytest.raises(BadAnswer, match="more than 1000 bytes"):
                await call.body(1000)
        else:
            assert await call.body(1000) == b"x" * size
        await fake.stop()


class TestSupervision:
    async def test_a_task_that_fails_is_logged_counted_and_started_again(self, monkeypatch, caplog):
        monkeypatch.setattr("megatron_ext.coordinator.supervision.PAUSE", 0.0)
        supervisor, runs = Supervisor(), []

        async def fails_twice() -> None:
            runs.append(None)
            if len(runs) < 3:
                raise RecursionError("too deep")

        await asyncio.wait_for(supervisor.start("heartbeats", "http://a", fails_twice), PATIENCE)
        assert len(runs) == 3
        assert supervisor.restarts == {"heartbeats": 2}
        assert caplog.text.count("the task heartbeats of http://a has failed") == 2
        assert "RecursionError: too deep" in caplog.text

    @pytest.mark.parametrize("method", ["_probe", "_sweep"])
    async def test_a_fault_in_the_supervision_does_not_end_it(self, monkeypatch, method):
        """RP-4: the replica that dies afterwards is dead, and the restart is counted."""
        monkeypatch.setattr("megatron_ext.coordinator.supervision.PAUSE", 0.01)
        faults = ["one"]
        original = getattr(Fleet, method)

        async def faulty(self: Fleet, member: Member) -> None:
            if faults:
                faults.pop()
                raise RuntimeError("planted")
            await original(self, member)

        monkeypatch.setattr(Fleet, method, faulty)
        async with fleet(1, replica_timeout=0.5) as (front, fakes):
            await front.until(fakes[0], Status.READY)
            assert sum(front.coordination.supervisor.restarts.values()) == 1
            assert "task_restarts_total" in (await front.http.get("/metrics")).text
            await fakes[0].stop()
            await front.until(fakes[0], Status.DEAD)

    async def test_removing_a_replica_ends_its_tasks(self):
        watched = Fleet(Router(RoutingConfig()), 0.5)
        watched.add("http://127.0.0.1:9", Source.FLAG)
        tasks = list(watched._tasks["http://127.0.0.1:9"])
        watched.remove("http://127.0.0.1:9")
        await eventually(lambda: all(task.cancelled() for task in tasks))

    @pytest.mark.parametrize("turns", range(5))
    async def test_a_replica_that_is_removed_at_an_event_ends_its_tasks(self, turns):
        """RP-4: a cancellation is not lost if the awaited event occurs at the same moment."""
        watched = Fleet(Router(RoutingConfig()), 4.0)
        member = watched.add("http://127.0.0.1:9", Source.FLAG)
        tasks = list(watched._tasks[member.url])
        await watched.first_look()
        await eventually(lambda: bool(member.poked._waiters))  # the task waits for the next heartbeat
        member.poked.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        watched.remove(member.url)
        await eventually(lambda: all(task.cancelled() for task in tasks))

    @pytest.mark.parametrize("turns", range(5))
    async def test_cancelling_a_wait_cancels_the_awaited_work(self, turns):
        result = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await result

        working = asyncio.ensure_future(work())
        waiting = asyncio.ensure_future(within(PATIENCE, working))
        await asyncio.sleep(0)
        result.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        was_over = waiting.done()
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled() != was_over
        assert working.done()

    async def test_a_time_out_cancels_and_errors_pass(self):
        working = asyncio.ensure_future(asyncio.sleep(PATIENCE))
        with pytest.raises(asyncio.TimeoutError):
            await within(0.0, working)
        assert working.cancelled()

        async def fails() -> None:
            raise KeyError("planted")

        with pytest.raises(KeyError, match="planted"):
            await within(PATIENCE, fails())


class TestTheCause:
    async def test_a_request_that_fails_by_itself_is_not_tried_again(self):
        async with fleet(3) as (front, fakes):
            for fake in fakes:
                fake.behave = error(500, "request_failed")
            answer = await front.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_failed")
            assert sum(len(fake.requests) for fake in fakes) == 1

    async def test_a_500_of_two_replicas_is_passed_on(self):
        async with fleet(4) as (front, fakes):
            for fake in fakes:
                fake.behave = error(500)
            assert (await front.complete()).status_code == 500
            assert sum(len(fake.requests) for fake in fakes) == 2


def test_errors_of_calls_are_told_apart():
    assert issubclass(BadAnswer, CallFailed)
    assert BadAnswer("too long").has_reached
