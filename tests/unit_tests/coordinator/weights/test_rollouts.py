"""RL-8: a fleet gets new weights at once or replica by replica, and replicas that are left out are named."""

from __future__ import annotations

import asyncio

import pytest

from megatron_ext.coordinator.membership.member import Source, Status
from tests.unit_tests.support.fleet import FakeReplica, coordinator, eventually
from tests.unit_tests.support.updatable import PATH, Updatable, updatable_fleet, update

ROLLOUTS = ("barrier", "rolling")


class TestUpdated:
    @pytest.mark.parametrize("rollout", ROLLOUTS)
    async def test_all_have_the_weights(self, rollout, caplog):
        """Numbers are one more than the highest; caches known so far are forgotten; fields are passed on."""
        async with updatable_fleet(3) as (front, fakes):
            fakes[1].fake.beat["weights_version"] = 6
            await front.coordination.fleet.look_again()
            for number in range(3):
                await front.complete([number] * 40)
            assert sum(view.blocks for view in front.coordination.router.replicas()) == 30
            answer = await update(front, rollout=rollout, keep="this")
            assert answer.status_code == 200
            content = answer.json()
            assert (content["success"], content["weights_version"], content["out"]) == (True, 7, {})
            assert {row["stage"] for row in content["replicas"].values()} == {"updated"}
            for one in fakes:
                assert one.version == 7
                sent = {"model_path": "new", "in_flight": "finish", "weights_version": 7, "keep": "this"}
                assert [call.body for call in one.fake.others if call.path == PATH] == [sent]
                assert front.status(one.fake) is Status.READY
            assert not any(view.blocks for view in front.coordination.router.replicas())
            assert (await front.http.get("/health")).json()["weights_versions"] == {"7": 3}
            listed = (await front.http.get("/replicas")).json()
            assert [row["weights_version"] for row in listed["replicas"]] == [7, 7, 7]
            assert listed["weights_update"]["is_running"] is False
            assert "weights_version{" in (await front.http.get("/metrics")).text
            await front.check_idle()

    @pytest.mark.parametrize("rollout", ROLLOUTS)
    async def test_requests_in_flight_finish_first(self, rollout):
        """Requests of two versions at once run only on two replicas, and none begins on a replica that drains."""
        async with updatable_fleet(2) as (front, fakes):
            for one in fakes:
                one.release.clear()
            asking = [asyncio.ensure_future(front.complete([n] * 9)) for n in range(4)]
            await eventually(lambda: sum(one.running for one in fakes) == 4)
            updating = asyncio.ensure_future(update(front, rollout=rollout))
            await eventually(lambda: front.status(fakes[0].fake) is Status.UPDATING)
            late = [asyncio.ensure_future(front.complete([9 + n] * 9)) for n in range(2)]
            if rollout == "rolling":
                await eventually(lambda: fakes[1].running == 4)
                assert front.status(fakes[1].fake) is Status.READY
            else:
                await eventually(lambda: front.coordination.gate.waiting == 2)
            health = await front.http.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "ok")
            assert [one.version for one in fakes] == [0, 0]
            for one in fakes:
                one.release.set()
            assert (await updating).status_code == 200
            first = [answer.json()["version"] for answer in await asyncio.gather(*asking)]
            last = [answer.json()["version"] for answer in await asyncio.gather(*late)]
            assert (first, last) == ([0] * 4, [0, 0] if rollout == "rolling" else [1, 1])
            assert not any(one.mixed for one in fakes)
            await front.check_idle()

    @pytest.mark.parametrize("in_flight", ["recompute", "abort", "continue"])
    async def test_what_becomes_of_requests_in_flight_is_the_callers_choice(self, in_flight):
        async with updatable_fleet(1) as (front, (one,)):
            one.release.clear()
            asking = asyncio.ensure_future(front.complete())
            await eventually(lambda: one.running == 1)
            assert (await update(front, in_flight=in_flight)).status_code == 200
            one.release.set()
            assert (await asking).json()["version"] == 0
            assert one.mixed == 1, "it was asked for"
            assert not any(view.blocks for view in front.coordination.router.replicas()), "of the old weights"

    async def test_one_replica_at_a_time(self):
        async with updatable_fleet(3) as (front, fakes):
            seen, open_ = [], []
            for one in fakes:
                one.on_write = lambda: (
                    seen.append([front.status(each.fake) for each in fakes]),
                    open_.append(sum(view.is_open for view in front.coordination.router.replicas())),
                )
            assert (await update(front, rollout="rolling")).status_code == 200
            assert [statuses.count(Status.UPDATING) for statuses in seen] == [1, 1, 1]
            assert [statuses.count(Status.READY) for statuses in seen] == open_ == [2, 2, 2]

    async def test_the_only_replica(self):
        """Requests wait for it, also in a rolling update, and no longer than allowed."""
        async with updatable_fleet(1) as (front, (one,)):
            one.fake.holds[PATH] = asyncio.Event()
            updating = asyncio.ensure_future(update(front, rollout="rolling", max_wait_seconds=0.3))
            await eventually(lambda: one.is_asked)
            answer = await front.complete()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "weights_updating")
            waiting = asyncio.ensure_future(front.complete())
            await eventually(lambda: front.coordination.gate.waiting == 1)
            one.fake.holds[PATH].set()
            assert (await waiting).json()["version"] == 1
            assert (await updating).status_code == 200

    async def test_a_replica_that_joins_does_not_open_the_barrier(self):
        async with updatable_fleet(1) as (front, (one,)):
            one.fake.holds[PATH] = asyncio.Event()
            updating = asyncio.ensure_future(update(front))
            await eventually(lambda: one.is_asked)
            new = await Updatable(FakeReplica(name="new")).start()
            try:
                front.coordination.fleet.add(new.fake.url, Source.ADMIN)
                await front.until(new.fake, Status.READY)
                waiting = asyncio.ensure_future(front.complete())
                await eventually(lambda: front.coordination.gate.waiting == 1 or bool(new.fake.requests))
                one.fake.holds[PATH].set()
                assert (await updating).status_code == 200
                assert (await waiting).json()["version"] == 1
                await eventually(lambda: new.version == 1)
                await front.until(new.fake, Status.READY)
            finally:
                await new.fake.stop()

    async def test_a_request_that_moves_waits_too(self):
        """A retry is a new beginning: none runs before all replicas are updated."""
        async with updatable_fleet(2) as (front, fakes):
            for one in fakes:
                one.release.clear()
            asking = asyncio.ensure_future(front.complete())
            await eventually(lambda: sum(one.running for one in fakes) == 1)
            busy, idle = sorted(fakes, key=lambda one: -one.running)
            updating = asyncio.ensure_future(update(front))
            await eventually(lambda: front.status(idle.fake) is Status.UPDATING)
            busy.fails_with = 500
            idle.fake.holds[PATH] = asyncio.Event()
            for one in fakes:
                one.release.set()
            await eventually(lambda: front.coordination.gate.waiting == 1)
            assert not idle.fake.requests
            idle.fake.holds[PATH].set()
            assert (await updating).status_code == 200
            assert (await asking).json() | {"usage": 0} == {"by": idle.fake.name, "version": 1, "usage": 0}

    async def test_a_long_update_is_no_hang(self):
        """Steps stop while weights are written; requests in flight stay."""
        async with updatable_fleet(1, replica_timeout=1.0) as (front, (one,)):
            one.release.clear()
            asking = asyncio.ensure_future(front.complete())
            await eventually(lambda: one.running == 1)
            one.fake.holds[PATH] = asyncio.Event()
            updating = asyncio.ensure_future(update(front, in_flight="recompute"))
            await eventually(lambda: one.is_asked)
            await asyncio.sleep(2.5)
            await front.until(one.fake, Status.UPDATING)
            one.fake.holds[PATH].set()
            one.release.set()
            assert (await updating).status_code == (await asking).status_code == 200
            assert len(one.fake.requests) == 1

    async def test_several_groups(self):
        """Only the group that is named gets the weights, and only its requests wait."""
        fakes = [Updatable(FakeReplica(beat={"model": name, "configuration": name})) for name in ("small", "large")]
        for one in fakes:
            await one.fake.start()
        try:
            async with coordinator(
                *(one.fake for one in fakes), model=("small", "large"), replica_timeout=2.0
            ) as front:
                assert (await update(front)).status_code == 400
                fakes[1].fake.holds[PATH] = asyncio.Event()
                updating = asyncio.ensure_future(update(front, model="large"))
                await eventually(lambda: fakes[1].is_asked)
                assert (await front.complete(model="small")).json()["version"] == 0
                waiting = asyncio.ensure_future(front.complete(model="large"))
                await eventually(lambda: front.coordination.gate.waiting == 1)
                fakes[1].fake.holds[PATH].set()
                assert (await updating).status_code == 200
                assert (await waiting).json()["version"] == 1
                assert [one.version for one in fakes] == [0, 1]
        finally:
            for one in fakes:
                await one.fake.stop()


class TestFailed:
    @pytest.mark.parametrize(
        ("rollout", "failure"),
        [*(("barrier", one) for one in (400, "dies", "lies", "other weights")), ("rolling", 503), ("rolling", "dies")],
    )
    async def test_one_replica_is_out(self, rollout, failure, caplog):
        """The others have the new weights; the answer, the status page and `out` name the one that has not."""
        async with updatable_fleet(3) as (front, fakes):
            bad = fakes[1]
            bad.write_fails = failure
            answer = await update(front, rollout=rollout)
            assert answer.status_code == (failure if isinstance(failure, int) else 502)
            content = answer.json()
            assert content["success"] is False
            assert list(content["out"]) == [bad.fake.url]
            stages = [content["replicas"][one.fake.url]["stage"] for one in fakes]
            assert stages == ["updated", "failed", "updated"]
            assert [front.status(one.fake) for one in fakes] == [Status.READY, Status.OUTDATED, Status.READY]
            for number in range(6):
                assert (await front.complete([number] * 9)).json()["by"] != bad.fake.name
            await front.coordination.fleet.look_again()
            assert len(bad.calls) == 1, "it is not asked again by itself"
            bad.write_fails = None
            assert (await update(front, rollout=rollout, weights_version=5)).status_code == 200
            assert [one.version for one in fakes] == [5, 5, 5]
            assert front.status(bad.fake) is Status.READY

    async def test_an_answer_alone_is_no_update(self):
        async with updatable_fleet(1) as (front, (one,)):
            one.write_fails = "lies"
            answer = await update(front)
            assert (answer.status_code, answer.json()["success"]) == (502, False)
            assert (await front.complete()).json()["version"] == 0

    async def test_most_replicas_are_out(self):
        """The new version counts, not the one that most have."""
        async with updatable_fleet(3) as (front, fakes):
            for one in fakes[:2]:
                one.write_fails = 503
            assert (await update(front)).status_code == 503
            assert [front.status(one.fake) for one in fakes] == [Status.OUTDATED, Status.OUTDATED, Status.READY]

    @pytest.mark.parametrize("rollout", ROLLOUTS)
    async def test_none_has_the_new_weights(self, rollout):
        """A wrong path changes nothing; a rolling update ends with the first replica."""
        async with updatable_fleet(3) as (front, fakes):
            for one in fakes:
                one.write_fails = 400
            answer = await update(front, rollout=rollout)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "c")
            assert [len(one.calls) for one in fakes] == ([1, 1, 1] if rollout == "barrier" else [1, 0, 0])
            assert [front.status(one.fake) for one in fakes] == [Status.READY] * 3
            assert [one.version for one in fakes] == [0, 0, 0]

    @pytest.mark.parametrize("rollout", ROLLOUTS)
    async def test_requests_that_do_not_end(self, rollout):
        """Nothing is written, and both requests and replicas go on."""
        async with updatable_fleet(2) as (front, fakes):
            for one in fakes:
                one.release.clear()
            asking = [asyncio.ensure_future(front.complete([n] * 9)) for n in range(2)]
            await eventually(lambda: [one.running for one in fakes] == [1, 1])
            answer = await update(front, rollout=rollout, drain_seconds=0.2)
            assert answer.status_code == 504
            assert "did not end in 0.2 s" in answer.text
            assert not any(one.calls for one in fakes)
            assert [front.status(one.fake) for one in fakes] == [Status.READY] * 2
            for one in fakes:
                one.release.set()
            assert [one.json()["version"] for one in await asyncio.gather(*asking)] == [0, 0]

    async def test_a_replica_that_is_still_writing_is_out_until_it_has_ended(self):
        """After a time-out what it will have is open; it takes no requests before its heartbeat tells."""
        async with updatable_fleet(2) as (front, fakes):
            slow = fakes[1]
            slow.is_slow = True
            answer = await update(front, update_seconds=0.3)
            assert (answer.status_code, list(answer.json()["out"])) == (502, [slow.fake.url])
            assert front.status(slow.fake) is Status.UPDATING
            slow.fake.beat["is_updating"] = False
            await front.until(slow.fake, Status.OUTDATED)
            slow.write(1)
            await front.until(slow.fake, Status.READY)

    async def test_a_replica_that_is_lost(self):
        """The replica is named while it is dead, and gets the weights when it returns."""
        async with updatable_fleet(2) as (front, fakes):
            fakes[1].fake.is_frozen = True
            await front.until(fakes[1].fake, Status.DEAD)
            answer = await update(front)
            assert answer.status_code == 200
            assert list(answer.json()["out"]) == [fakes[1].fake.url]
            fakes[1].fake.is_frozen = False
            await front.until(fakes[1].fake, Status.READY)
            assert fakes[1].version == 1

    async def test_callers_without_permission_change_nothing(self):
        async with updatable_fleet(2) as (front, fakes):
            fakes[1].fake.statuses["/is_paused"] = 403
            answer = await update(front)
            assert (answer.status_code, answer.json()["error"]["message"]) == (403, "no")
            assert not any(one.calls for one in fakes)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"model_path": 5}, "model_path"),
            ({"rollout": "blue-green"}, "rollout"),
            ({"in_flight": "drop"}, "in_flight"),
            ({"drain_seconds": 0}, "drain_seconds"),
            ({"update_seconds": 1e9}, "update_seconds"),
            ({"weights_version": -1}, "weights_version"),
        ],
    )
    async def test_wrong_fields(self, fields, param):
        async with updatable_fleet(1) as (front, (one,)):
            answer = await update(front, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert not one.calls


class TestOneAtATime:
    async def test_a_second_update_is_refused(self):
        async with updatable_fleet(2) as (front, fakes):
            for one in fakes:
                one.fake.holds[PATH] = asyncio.Event()
            updating = asyncio.ensure_future(update(front))
            await eventually(lambda: all(one.is_asked for one in fakes))
            answer = await update(front, model_path="other")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "update_under_way")
            assert "new" in answer.json()["error"]["message"]
            for one in fakes:
                one.fake.holds[PATH].set()
            assert (await updating).status_code == 200
            assert (await update(front, model_path="other")).status_code == 200
            assert [one.version for one in fakes] == [2, 2]

    async def test_an_update_by_another_coordinator(self):
        """Replicas of an update by another coordinator take no requests meanwhile."""
        async with updatable_fleet(2) as (front, fakes):
            fakes[1].fake.beat["is_updating"] = True
            await front.until(fakes[1].fake, Status.UPDATING)
            answer = await update(front)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "update_under_way")
            assert fakes[1].fake.url in answer.text
            assert {(await front.complete([n] * 9)).json()["by"] for n in range(4)} == {fakes[0].fake.name}

    async def test_a_caller_that_leaves(self):
        """The update goes on, is shown, and the call can be repeated."""
        async with updatable_fleet(2) as (front, fakes):
            for one in fakes:
                one.fake.holds[PATH] = asyncio.Event()
            calling = asyncio.ensure_future(update(front))
            await eventually(lambda: all(one.is_asked for one in fakes))
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await front.http.get("/version")
            shown = (await front.http.get("/replicas")).json()["weights_update"]
            assert shown == {
                "is_running": True,
                "rollout": "barrier",
                "model_path": "new",
                "weights_version": 1,
                "replicas": {one.fake.url: "writing" for one in fakes},
            }
            for one in fakes:
                one.fake.holds[PATH].set()
            await eventually(lambda: not front.coordination.updates.describe()["is_running"])
            assert [one.version for one in fakes] == [1, 1]
            assert (await front.complete()).json()["version"] == 1

    async def test_a_coordinator_that_ends_in_the_middle(self):
        """The next one routes to one version, and a repeated call completes the update."""
        fakes = [await Updatable(FakeReplica(name=f"fake {n}")).start() for n in range(3)]
        plain = [one.fake for one in fakes]
        try:
            fakes[1].fake.holds[PATH] = asyncio.Event()
            async with coordinator(*plain, replica_timeout=2.0) as front:
                updating = asyncio.ensure_future(update(front, rollout="rolling"))
                await eventually(lambda: fakes[1].is_asked)
                await front.coordination.updates.close()
                answer = await updating
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "update_interrupted")
            assert [one.version for one in fakes] == [1, 0, 0]
            fakes[1].fake.holds.clear()
            async with coordinator(*plain, replica_timeout=2.0) as front:
                await front.until(plain[0], Status.OUTDATED)
                assert {(await front.complete([n] * 9)).json()["version"] for n in range(4)} == {0}
                assert (await update(front, rollout="rolling", weights_version=1)).status_code == 200
                assert [one.version for one in fakes] == [1, 1, 1]
                assert {(await front.complete([n] * 9)).json()["version"] for n in range(4)} == {1}
        finally:
            for fake in plain:
                await fake.stop()
