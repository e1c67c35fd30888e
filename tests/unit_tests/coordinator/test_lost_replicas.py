"""RP-4: requests of a replica that fails, hangs, restarts or leaves go to another one, or get an error."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from megatron_ext.coordinator.membership.fleet import BEATS
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.coordinator.retries import MAX_LOST
from tests.unit_tests.support.fleet import (
    EVENTS,
    HEALTHY_STREAM,
    PATIENCE,
    answers,
    breaks_off,
    dies,
    eventually,
    first_choice,
    fleet,
    generations,
)


class TestLost:
    @pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
    async def test_a_request_without_output_is_retried_elsewhere(self, is_stream):
        async with fleet(2) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.behave = breaks_off(0) if is_stream else dies
            answer = await front.complete(stream=is_stream)
            assert answer.status_code == 200
            assert answer.text == HEALTHY_STREAM if is_stream else answer.json()["by"] == other.name
            assert generations([chosen, other]) == [1, 1]
            await front.check_idle()
            metrics = (await front.http.get("/metrics")).text
            assert f'requests_moved_total{{reason="lost",replica="{chosen.url}"}} 1.0' in metrics

    async def test_a_stream_that_has_begun_ends_with_an_error_object(self):
        """Whole events only, none of them twice, and no [DONE]."""
        async with fleet(2) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.behave = breaks_off(2)
            events = (await front.stream()).split("\n\n")
            assert events[:2] == [event.decode().strip() for event in EVENTS[:2]]
            told = json.loads(events[2].removeprefix("data: "))["error"]
            assert (told["code"], told["type"]) == ("replica_lost", "server_error")
            assert events[3:] == [""]
            assert generations([chosen, other]) == [1, 0]
            await front.check_idle()

    async def test_a_replica_that_is_gone(self):
        async with fleet(2) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            await chosen.stop()
            assert (await front.complete()).json()["by"] == other.name
            await front.until(chosen, Status.SILENT)
            await other.stop()
            answer = await front.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
            assert answer.headers["retry-after"] == "1"

    async def test_a_silent_replica_is_tried_when_no_other_is_left(self):
        """TE-6: a replica whose last answer did not come is avoided, not given up: it may answer a request."""
        async with fleet(1) as (front, fakes):
            fakes[0].beat["block_size"] = 0
            await front.until(fakes[0], Status.SILENT)
            assert (await front.complete()).status_code == 200

    async def test_a_replica_that_leaves_while_it_drains(self):
        """TE-6: a replica that drains to leave, and is removed before that, has its requests moved."""

        async def never(fake, exchange):
            await asyncio.sleep(PATIENCE)

        async with fleet(2) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.behave = never
            asking = asyncio.ensure_future(front.complete())
            await eventually(lambda: len(chosen.requests) == 1)
            front.coordination.fleet.drain(chosen.url, leaves=True)
            assert chosen.url in front.coordination.fleet.members
            front.coordination.fleet.remove(chosen.url)
            answer = await asking
            assert (answer.status_code, answer.json()["by"]) == (200, other.name)
            assert list(front.coordination.fleet.members) == [other.url]
            await front.check_idle()

    async def test_no_replica_is_there(self):
        async with fleet(0, enable_admin_routes=True, api_key="k") as (front, _):
            answer = await front.complete(headers={"authorization": "Bearer k"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")

    async def test_a_hung_replica_is_given_up_and_joins_again(self):
        """A replica that accepts connections but answers nothing, like a stopped process, leaves and joins again."""
        async with fleet(2, replica_timeout=0.5) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.is_frozen = True
            answer = await asyncio.wait_for(front.complete(), PATIENCE)
            assert answer.json()["by"] == other.name
            await front.until(chosen, Status.DEAD)
            assert [view.name for view in front.coordination.router.replicas()] == [other.url]
            chosen.is_frozen = False
            await front.until(chosen, Status.READY)
            await front.check_idle()

    async def test_a_hung_replica_is_avoided_long_before_it_is_dead(self):
        """RP-10: one heartbeat without an answer suffices, which is waited for at most 2 s."""
        async with fleet(2, replica_timeout=3600.0) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.is_frozen = True
            await front.until(chosen, Status.SILENT)
            for number in range(4):
                assert (await front.complete([number] * 9)).json()["by"] == other.name

    async def test_a_coordinator_that_is_held_up_gives_no_replica_up(self):
        """TE-3: time in which it cannot read signs of life does not count, as on a busy machine."""
        async with fleet(2, replica_timeout=0.4) as (front, _):
            watched, left = front.coordination.fleet, []
            forget = watched.on_leave
            watched.on_leave = lambda member: (left.append(member.url), forget(member))
            time.sleep(1.0)  # the event loop stands still
            for member in watched.members.values():
                member.probed.clear()
                await asyncio.wait_for(member.probed.wait(), PATIENCE)
            assert not left
            assert (await front.complete()).status_code == 200

    async def test_a_hung_replica_that_was_computing_joins_again(self):
        """TE-6: a replica that was silent is not one whose engine is stuck: its first answer lets it join."""
        async with fleet(2, replica_timeout=0.5) as (front, fakes):
            fakes[0].beat["living"] = 1
            fakes[0].is_frozen = True
            await front.until(fakes[0], Status.DEAD)
            fakes[0].is_frozen = False
            await front.until(fakes[0], Status.READY)

    async def test_a_hung_engine_of_an_answering_server(self):
        """A replica whose engine no longer steps stays out until its steps go on."""

        async def never(fake, exchange):
            fake.beat["living"] = 1
            await asyncio.sleep(PATIENCE)

        async with fleet(2, replica_timeout=0.5) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.behave = never
            assert (await front.complete()).json()["by"] == other.name
            await front.until(chosen, Status.DEAD)
            await asyncio.sleep(0.3)
            assert front.status(chosen) is Status.DEAD
            chosen.beat["steps"] = 1
            await front.until(chosen, Status.READY)

    async def test_waits_for_a_paused_engine(self):
        """RP-4: a replica that computes nothing because it is paused is not taken for a hung one."""
        release = asyncio.Event()

        async def waits(fake, exchange):
            await release.wait()
            await answers(fake, exchange)

        async with fleet(1, replica_timeout=0.4) as (front, fakes):
            fakes[0].beat |= {"status": "paused", "living": 1}
            fakes[0].behave = waits
            await front.until(fakes[0], Status.PAUSED)
            asking = asyncio.ensure_future(front.complete())
            member = front.coordination.fleet.members[fakes[0].url]
            for _ in range(3 * BEATS):
                member.probed.clear()
                await asyncio.wait_for(member.probed.wait(), PATIENCE)
                assert front.status(fakes[0]) is Status.PAUSED
            release.set()
            assert (await asking).status_code == 200
            assert generations(fakes) == [1]

    @pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
    async def test_waits_for_a_slow_request_while_steps_advance(self, is_stream):
        async def slowly(fake, exchange):
            for _ in range(12):
                fake.beat["steps"] += 1
                await asyncio.sleep(0.1)
            await answers(fake, exchange)

        async with fleet(2, replica_timeout=0.4) as (front, fakes):
            chosen, other = await first_choice(front, fakes)
            chosen.behave = slowly
            assert (await front.complete(stream=is_stream)).status_code == 200
            assert generations([chosen, other]) == [1, 0]

    async def test_a_restarted_replica_is_another_one(self):
        """Requests in flight to the previous process run elsewhere, and its cache contents are forgotten."""

        async def never(fake, exchange):
            await asyncio.sleep(PATIENCE)

        async with fleet(2, replica_timeout=1.0) as (front, fakes):
            prompt = list(range(40))
            await front.complete(prompt)
            chosen, other = fakes if fakes[0].requests else fakes[::-1]
            known = {view.name: view.blocks for view in front.coordination.router.replicas()}
            assert known == {chosen.url: 10, other.url: 0}
            chosen.behave = never
            asking = asyncio.ensure_future(front.complete(prompt))
            await eventually(lambda: len(chosen.requests) == 2)
            chosen.restart()
            assert (await asking).json()["by"] == other.name
            known = {view.name: view.blocks for view in front.coordination.router.replicas()}
            assert known == {chosen.url: 0, other.url: 10}

    async def test_a_request_that_replicas_die_of_is_not_given_to_all(self):
        async with fleet(MAX_LOST + 2) as (front, fakes):
            for fake in fakes:
                fake.behave = dies
            answer = await front.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")
            assert sum(generations(fakes)) == MAX_LOST

    async def test_a_client_that_leaves_ends_the_request(self):
        async def never(fake, exchange):
            exchange.head(200, "text/event-stream")
            if exchange.body.get("stream"):
                exchange.data(EVENTS[0])
            await asyncio.sleep(PATIENCE)

        async with fleet(1) as (front, fakes):
            fakes[0].behave = never
            asking = asyncio.ensure_future(front.complete())
            await eventually(lambda: len(fakes[0].requests) == 1)
            asking.cancel()
            await eventually(lambda: fakes[0].left == 1)
            async with front.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
                await anext(answer.aiter_bytes())
            await eventually(lambda: fakes[0].left == 2)
            await front.check_idle()
