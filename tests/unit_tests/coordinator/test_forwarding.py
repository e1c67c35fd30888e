"""RP-4: every request gets one answer, or an error object, even if its replica fails; none waits forever."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from megatron_ext.coordinator.forwarding import whole_events
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.coordinator.replica_client import Address, Call, CallFailed, CompleteAnswer
from megatron_ext.coordinator.retries import MAX_LOST, Retries
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.http.request_parts import SENDER_HEADER
from tests.unit_tests.support.fleet import (
    EVENTS,
    HEALTHY_STREAM,
    PATIENCE,
    FakeReplica,
    answers,
    breaks_off,
    dies,
    error,
    eventually,
    first_choice,
    fleet,
    generations,
)


class TestPassingOn:
    async def test_answers_streams_and_errors_are_the_replicas(self):
        async with fleet(2) as (front, fakes):
            assert (await front.complete()).json()["usage"] == {"completion_tokens": 3}
            assert await front.stream() == HEALTHY_STREAM
            for fake in fakes:
                fake.behave = error(400, "context_length_exceeded")
            answer = await front.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert sum(generations(fakes)) == 3, "what makes no sense is tried once"
            await front.check_idle()

    async def test_the_body_and_the_key_reach_the_replica_as_they_were(self):
        async with fleet(1) as (front, fakes):
            body = {"prompt": "ä", "temperature": 0.5, "unknown": [1]}
            await front.complete(**body, headers={"authorization": "Bearer k"})
            exchange = fakes[0].requests[0]
            assert exchange.body == body
            assert exchange.headers["authorization"] == "Bearer k"
            assert exchange.headers["host"] in fakes[0].url

    async def test_bodies_that_are_none(self):
        async with fleet(1) as (front, fakes):
            for content, status in ((b"[1]", 400), (b"{", 400), (b"", 400), (b" " * (9 << 20), 413)):
                headers = {"content-type": "application/json"}
                answer = await front.http.post("/v1/completions", content=content, headers=headers)
                assert answer.status_code == status
                assert answer.json()["error"]["message"]
            assert (await front.http.post("/v1/completions", content=b"{}")).status_code == 415
            assert generations(fakes) == [0]


class TestLoad:
    async def test_streamed_events_reduce_the_load(self):
        """TE-6: the first event ends the prefill, each further one takes one token."""
        go_on = asyncio.Semaphore(0)

        async def in_steps(fake, exchange):
            exchange.head(200, "text/event-stream")
            for event in EVENTS:
                await go_on.acquire()
                exchange.data(event)
            exchange.end()

        async with fleet(1) as (front, fakes):
            fakes[0].behave = in_steps

            def load() -> int:
                return front.coordination.router.replicas()[0].load

            asking = asyncio.ensure_future(front.complete(max_tokens=50, stream=True))
            await eventually(lambda: load() == 51)  # a prompt of which nothing is known counts as one token
            seen = []
            for left in (50, 49, 48):
                go_on.release()
                await eventually(lambda: load() != ([51, *seen])[-1])
                seen.append(load())
                assert seen[-1] == left
            go_on.release()
            await asking
            await front.check_idle()

    @pytest.mark.parametrize(
        ("fields", "tokens"),
        [
            ({}, 16),
            ({"max_tokens": 10}, 10),
            ({"max_tokens": 10, "n": 4}, 40),
            ({"max_tokens": 10, "max_completion_tokens": 7}, 7),
            ({"max_tokens": "x", "n": "y"}, 16),
        ],
    )
    async def test_load_includes_the_tokens_to_generate(self, fields, tokens):
        """TE-6: tokens of all its choices, as far as the request says."""

        async def never(fake, exchange):
            await asyncio.sleep(PATIENCE)

        async with fleet(1) as (front, fakes):
            fakes[0].behave = never
            asking = asyncio.ensure_future(front.complete(**fields))
            await eventually(lambda: len(fakes[0].requests) == 1)
            assert front.coordination.router.replicas()[0].load == 1 + tokens
            asking.cancel()
            await front.check_idle()


class TestLoadOfOthers:
    """Two coordinators before the same replicas see each other's requests through the replicas."""

    async def test_a_replica_that_others_use_gets_less(self):
        async with fleet(2) as (front, fakes):
            busy, idle = fakes
            for limit, expected in ((40, 40), (50_000, 5 * 256)):
                busy.beat["others"] = {"requests": 5, "prompt_tokens": 10_000, "output_tokens": limit}
                await front.coordination.fleet.look_again()
                load = {view.name: view.load for view in front.coordination.router.replicas()}
                assert load == {busy.url: 10_000 + expected, idle.url: 0}
            assert {(await front.complete([number] * 9)).json()["by"] for number in range(4)} == {idle.name}
            front.coordination.router.check()
            busy.beat["others"] = {"requests": 0, "prompt_tokens": 0, "output_tokens": 0}
            await front.coordination.fleet.look_again()
            await front.check_idle()

    async def test_its_own_requests_are_told_apart_by_a_header(self):
        async with fleet(1) as (front, fakes):
            await front.complete()
            (request,) = fakes[0].requests
            probes = {one.headers[SENDER_HEADER] for one in fakes[0].others if one.path == "/replica"}
            assert probes == {request.headers[SENDER_HEADER]}


class TestFullAndFailing:
    async def test_429_only_when_all_are_full_with_the_shortest_wait(self):
        async with fleet(3) as (front, fakes):
            for fake, seconds in zip(fakes, ("17", "5", "9"), strict=True):
                fake.behave = error(429, "rate_limit_exceeded", retry_after=seconds)
            answer = await front.complete()
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "5"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert generations(fakes) == [1, 1, 1]
            fakes[2].behave = answers
            assert (await front.complete()).status_code == 200
            await fakes[2].stop()
            assert (await front.complete()).status_code == 429, "one that is gone is no reason not to wait"
            assert "requests_rejected_total 2.0" in (await front.http.get("/metrics")).text

    async def test_replicas_that_refuse_do_not_use_up_the_tries(self):
        """TE-6: a replica that refuses with 503 has computed nothing: as many as there are may do so."""
        async with fleet(MAX_LOST + 2) as (front, fakes):
            for fake in fakes:
                fake.behave = error(503, "server_asleep")
            await front.complete()
            assert generations(fakes) == [1] * len(fakes)

    @pytest.mark.parametrize(("status", "code"), [(503, "server_asleep"), (503, None), (500, None)])
    async def test_retries_elsewhere_if_another_replica_may_succeed(self, status, code):
        async with fleet(2) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.behave = error(status, code)
            assert (await front.complete(stream=True)).text == HEALTHY_STREAM
            other.behave = error(status, code)
            answer = await front.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

    async def test_a_request_that_an_administrator_ended_is_not_retried(self):
        async with fleet(2) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.behave = error(503, "request_aborted")
            assert (await front.complete()).json()["error"]["code"] == "request_aborted"
            assert generations([chosen, other]) == [1, 0]


async def test_a_random_life():
    """Replicas die, hang, are full, fail, break off and come back; each of 120 requests has one whole answer."""
    dice = random.Random(5)

    async def anything(fake, exchange):
        await asyncio.sleep(dice.random() * 0.05)
        fake.beat["steps"] += 1
        kind = dice.choices((answers, dies, breaks_off(2), error(429), error(503), error(500)), (12, 2, 2, 2, 2, 1))[0]
        await (answers if kind is dies and not exchange.body.get("stream") else kind)(fake, exchange)

    async def client(front, number: int) -> None:
        await asyncio.sleep(dice.random() * 1.5)
        is_stream = bool(dice.getrandbits(1))
        answer = await front.complete([number % 7] * 9 + [number], stream=is_stream)
        if answer.status_code != 200:
            assert answer.status_code in (429, 500, 503)
            assert answer.json()["error"]["message"]
        elif answer.text != HEALTHY_STREAM and is_stream:
            events = answer.text.split("\n\n")
            assert events[:-2] == [event.decode().strip() for event in EVENTS[: len(events) - 2]]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "replica_lost"

    async def mischief(fakes) -> None:
        while True:
            fake = dice.choice(fakes)
            fake.is_frozen = True
            await asyncio.sleep(0.3)
            fake.is_frozen = False
            fake.restart() if dice.random() < 0.5 else None
            await asyncio.sleep(0.1)

    async with fleet(4, replica_timeout=0.4) as (front, fakes):
        for fake in fakes:
            fake.behave = anything
        trouble = asyncio.ensure_future(mischief(fakes))
        await asyncio.wait_for(asyncio.gather(*(client(front, number) for number in range(120))), PATIENCE)
        trouble.cancel()
        await front.check_idle()


async def test_a_rolling_restart_loses_nothing():
    """Each replica is drained, ends when it is idle, and comes back at its address; each request has its answer."""

    async def slowly(fake, exchange):
        fake.beat["steps"] += 1
        await asyncio.sleep(0.02)
        await answers(fake, exchange)

    async with fleet(2, replica_timeout=1.0) as (front, fakes):
        members, is_over, seen = front.coordination.fleet, asyncio.Event(), []
        for fake in fakes:
            fake.behave = slowly

        async def client(number: int) -> None:
            while not is_over.is_set():
                answer = await front.complete([number] * 9, stream=bool(number % 2))
                seen.append((answer.status_code, number % 2 == 0 or answer.text == HEALTHY_STREAM))

        clients = [asyncio.ensure_future(client(number)) for number in range(8)]
        for fake in fakes:
            member = members.members[fake.url]
            before = len(seen)
            members.drain(fake.url)
            await eventually(lambda: not member.calls)  # noqa: B023
            await fake.stop()
            fake.restart()
            await fake.start(member.address.port)
            await front.until(fake, Status.READY)
            await eventually(lambda: len(seen) > before + 10)  # noqa: B023
        is_over.set()
        await asyncio.gather(*clients)
        assert set(seen) == {(200, True)}
        assert not any(member.moved for member in members.members.values()), "a drained replica got a request"
        await front.check_idle()


class TestParts:
    async def test_events_are_never_cut(self):
        async def pieces(data: bytes, size: int):
            for at in range(0, len(data), size):
                yield data[at : at + size]

        whole = b"".join(EVENTS)
        for size in (1, 7, 1000):
            parts = [part async for part in whole_events(pieces(whole, size))]
            assert b"".join(parts) == whole
            assert all(part.endswith(b"\n\n") for part in parts)
        with pytest.raises(CallFailed, match="within an event"):
            [part async for part in whole_events(pieces(whole[:-1], 7))]

    def test_a_failure_is_told_before_a_loss_and_a_wait_before_both(self):
        retries = Retries()
        assert retries.retry_elsewhere("a", CompleteAnswer(503, [], b"{}"))
        retries.lost("b", CallFailed("gone", has_reached=True))
        assert retries.verdict().status == 503
        assert retries.retry_elsewhere("c", CompleteAnswer(429, [(b"retry-after", b"nonsense")], b"{}"))
        with pytest.raises(ApiError) as refused:
            retries.verdict()
        assert refused.value.headers == {"Retry-After": "1"}
        assert retries.excluded == {"a", "b", "c"}

    def test_only_requests_that_may_have_killed_a_replica_count_as_lost(self):
        """TE-6: a connection that was refused reached nothing."""
        retries = Retries()
        for number in range(MAX_LOST + 1):
            retries.lost(f"gone {number}", CallFailed("no connection", has_reached=False))
        assert retries.may_go_on
        for number in range(MAX_LOST):
            assert retries.may_go_on
            retries.lost(f"dead {number}", CallFailed("it broke off", has_reached=True))
        assert not retries.may_go_on

    def test_requests_that_killed_replicas_are_not_retried(self):
        """TE-6: a replica that was full does not make a wait of a request that was given up."""
        retries = Retries()
        assert retries.retry_elsewhere("full", CompleteAnswer(429, [], b"{}"))
        for number in range(MAX_LOST):
            retries.lost(f"dead {number}", CallFailed("it broke off", has_reached=True))
        with pytest.raises(ApiError) as refused:
            retries.verdict()
        assert (refused.value.status, refused.value.code) == (503, "replica_lost")

    @pytest.mark.parametrize(("asked", "told"), [(b"0", "1"), (b"30", "30"), (b"86400", "60"), (b"-5", "1")])
    def test_a_wait_is_bounded_whatever_a_replica_asks_for(self, asked, told):
        """TE-6: between 1 and 60 seconds."""
        retries = Retries()
        assert retries.retry_elsewhere("full", CompleteAnswer(429, [(b"retry-after", asked)], b"{}"))
        with pytest.raises(ApiError) as refused:
            retries.verdict()
        assert refused.value.headers == {"Retry-After": told}

    async def test_a_call_that_reaches_nothing(self):
        """TE-6: no connection, or one that was given up before it was there: nothing was sent."""
        fake = await FakeReplica().start()
        call = Call(Address.of(fake.url))
        call.give_up("it is not needed any more")
        with pytest.raises(CallFailed, match="it is not needed any more") as failed:
            await call.start("POST", "/v1/completions", body=b"{}", patience=PATIENCE)
        assert not failed.value.has_reached
        await fake.stop()
        assert not fake.requests
        with pytest.raises(CallFailed, match="no connection") as failed:
            await Call(Address.of(fake.url)).start("GET", "/", patience=PATIENCE)
        assert not failed.value.has_reached
