"""RL-8: replicas that join or return with other weights than those of the last update get these first, once."""

from __future__ import annotations

import asyncio

from megatron_ext.coordinator.membership.member import Source, Status
from tests.unit_tests.support.fleet import FakeReplica, eventually
from tests.unit_tests.support.updatable import PATH, Updatable, updatable_fleet, update


async def test_a_replica_that_joins_or_is_restarted(tmp_path):
    """Replicas repeat the call of the last update, its key included; no request sees their own weights."""
    (tmp_path / "admin").write_text("admin")
    async with updatable_fleet(1, admin_key_file=str(tmp_path / "admin")) as (front, (one,)):
        key = {"authorization": "Bearer admin"}
        answer = await front.http.post(PATH, json={"model_path": "new", "weights_version": 8}, headers=key)
        assert answer.status_code == 200
        late = await Updatable(FakeReplica(name="late")).start()
        try:
            late.fake.holds[PATH] = asyncio.Event()
            front.coordination.fleet.add(late.fake.url, Source.ADMIN)
            await eventually(lambda: late.is_asked)
            assert front.status(late.fake) is Status.UPDATING
            assert {(await front.complete([n] * 9)).json()["by"] for n in range(4)} == {one.fake.name}
            late.fake.holds[PATH].set()
            await front.until(late.fake, Status.READY)
            assert {(await front.complete([9 + n] * 9)).json()["version"] for n in range(4)} == {8}
            late.fake.beat |= {"weights": "old", "weights_version": 0}
            late.fake.restart()
            await eventually(lambda: late.version == 8)
            await front.until(late.fake, Status.READY)
            assert [call.headers["authorization"] for call in late.calls] == ["Bearer admin"] * 2
            assert late.calls[0].body == {"model_path": "new", "in_flight": "finish", "weights_version": 8}
            await front.check_idle()
        finally:
            await late.fake.stop()


async def test_a_replica_that_cannot_read_them_is_out(caplog):
    """The replica is asked once, with one line in the log, and again after a restart."""
    async with updatable_fleet(2) as (front, fakes):
        assert (await update(front)).status_code == 200
        bad = fakes[1]
        bad.write_fails = 400
        bad.fake.beat |= {"weights": "old", "weights_version": 0}
        bad.fake.restart()
        await eventually(lambda: len(bad.calls) == 2)
        await front.until(bad.fake, Status.OUTDATED)
        for _ in range(3):
            await front.coordination.fleet.look_again()
        assert len(bad.calls) == 2
        assert caplog.text.count("has not got weights version 1: no") == 1
        row = next(row for row in front.coordination.rows() if row["url"] == bad.fake.url)
        assert row["problem"].endswith("; the update failed: no")
        bad.write_fails = None
        bad.fake.restart()
        await front.until(bad.fake, Status.READY)
        assert bad.version == 1


async def test_the_only_replica_returns():
    """Requests wait for its weights; those that it was loaded with are not served."""
    async with updatable_fleet(1) as (front, (one,)):
        assert (await update(front)).status_code == 200
        one.fake.holds[PATH] = asyncio.Event()
        one.fake.beat |= {"weights": "old", "weights_version": 0}
        one.fake.restart()
        await eventually(lambda: len(one.calls) == 2)
        waiting = asyncio.ensure_future(front.complete())
        await eventually(lambda: front.coordination.gate.waiting == 1)
        one.fake.holds[PATH].set()
        assert (await waiting).json()["version"] == 1


async def test_a_replica_that_returns_during_an_update():
    """The update leaves the replica out: it takes no requests before the end, and then gets the weights."""
    async with updatable_fleet(3) as (front, fakes):
        assert (await update(front)).status_code == 200
        fakes[1].fake.holds[PATH] = asyncio.Event()
        updating = asyncio.ensure_future(update(front, rollout="rolling", model_path="newer"))
        await eventually(lambda: len(fakes[1].calls) == 2)
        fakes[0].fake.beat |= {"weights": "old", "weights_version": 0}
        fakes[0].fake.restart()
        await front.until(fakes[0].fake, Status.OUTDATED)
        assert {(await front.complete([n] * 9)).json()["version"] for n in range(4)} == {1}
        fakes[1].fake.holds[PATH].set()
        await updating
        await eventually(lambda: fakes[0].version == 2)
        await front.until(fakes[0].fake, Status.READY)


async def test_weights_from_elsewhere_end_it(caplog):
    """Another coordinator has updated all replicas: they are not taken back, and serve."""
    async with updatable_fleet(2) as (front, fakes):
        assert (await update(front)).status_code == 200
        for one in fakes:
            one.write(5, "other")
        await front.coordination.fleet.look_again()
        for one in fakes:
            await front.until(one.fake, Status.READY)
        assert (await front.complete()).json()["version"] == 5
        assert [len(one.calls) for one in fakes] == [1, 1]
        assert "from elsewhere" in caplog.text


async def test_a_new_update_replaces_an_offer():
    async with updatable_fleet(2) as (front, fakes):
        assert (await update(front)).status_code == 200
        fakes[1].fake.holds[PATH] = asyncio.Event()
        fakes[1].fake.beat |= {"weights": "old", "weights_version": 0}
        fakes[1].fake.restart()
        await eventually(lambda: len(fakes[1].calls) == 2)
        fakes[1].fake.holds.clear()
        assert (await update(front, model_path="newer")).status_code == 200
        assert [one.version for one in fakes] == [2, 2]
        assert [front.status(one.fake) for one in fakes] == [Status.READY] * 2
