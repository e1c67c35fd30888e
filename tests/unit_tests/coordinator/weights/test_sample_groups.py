"""RL-9: requests of one group of samples are answered by one version of the weights, whatever the fleet does."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from unittest import mock

import pytest

from megatron_ext.coordinator.membership import fleet
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.coordinator.membership.versions import Version
from megatron_ext.coordinator.weights.sample_groups import GROUP_HEADER, LONGEST_NAME, SampleGroups
from tests.unit_tests.support.fleet import PATIENCE, eventually
from tests.unit_tests.support.updatable import PATH, updatable_fleet, update

OLD, NEW = Version("a", 1), Version("b", 2)


def ask(front, name: str | None = "g", prompt: object = "hello", **headers: str):
    headers |= {} if name is None else {GROUP_HEADER: name}
    return asyncio.ensure_future(front.complete(prompt, headers=headers))


class TestBound:
    def test_to_the_version_of_the_first_request(self):
        groups = SampleGroups()
        assert groups.version("g") is groups.version(None) is None
        groups.began("g", OLD)
        groups.began("g", OLD)
        groups.ended("g", has_answered=True)
        groups.ended("g", has_answered=False)
        assert groups.version("g") == OLD

    def test_not_by_requests_that_no_replica_has_answered(self):
        groups = SampleGroups()
        groups.began("g", OLD)
        groups.began("g", OLD)
        groups.ended("g", has_answered=False)
        assert groups.version("g") == OLD, "one is in flight"
        groups.ended("g", has_answered=False)
        groups.began("g", NEW)
        assert groups.version("g") == NEW

    def test_the_least_recent_groups_are_forgotten(self):
        """Never one with a request in flight."""
        groups = SampleGroups(2)
        groups.began("first", OLD)
        for name in ("a", "b"):
            groups.began(name, OLD)
            groups.ended(name, has_answered=True)
        groups.ended("first", has_answered=True)
        groups.began("c", NEW)
        assert [groups.version(name) for name in ("first", "a", "b", "c")] == [None, None, OLD, NEW]


class TestRouted:
    async def test_to_replicas_of_their_version(self):
        """While one is updated, and after it: the group has begun on the others."""
        async with updatable_fleet(3) as (front, fakes):
            first = (await ask(front)).json()
            assert first["version"] == 0
            fakes[1].fake.holds[PATH] = asyncio.Event()
            updating = asyncio.ensure_future(update(front, rollout="rolling"))
            await eventually(lambda: fakes[1].is_asked)
            assert [front.status(one.fake) for one in fakes] == [Status.READY, Status.UPDATING, Status.READY]
            for number in range(6):
                answer = (await ask(front, prompt=[number] * 9)).json()
                assert (answer["version"], answer["by"]) == (0, fakes[2].fake.name)
            assert 1 in {(await ask(front, f"new {n}", [50 + n] * 9)).json()["version"] for n in range(6)}
            fakes[1].fake.holds[PATH].set()
            assert (await updating).status_code == 200
            answer = await ask(front)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "weights_version_gone")
            assert GROUP_HEADER in answer.json()["error"]["message"]
            assert (await ask(front, None)).json()["version"] == (await ask(front, "another")).json()["version"] == 1
            await front.check_idle()

    @pytest.mark.parametrize("rollout", ["barrier", "rolling"])
    async def test_a_group_that_has_begun_ends_on_replicas_that_drain(self, rollout):
        """Other requests wait for the new weights."""
        async with updatable_fleet(1) as (front, (one,)):
            one.release.clear()
            first = ask(front)
            await eventually(lambda: one.running == 1)
            updating = asyncio.ensure_future(update(front, rollout=rollout))
            await front.until(one.fake, Status.UPDATING)
            second, other, new = ask(front), ask(front, None), ask(front, "new")
            await eventually(lambda: one.running == 2)
            await eventually(lambda: front.coordination.gate.waiting == 2)
            assert not one.is_asked
            one.release.set()
            assert (await updating).status_code == 200
            assert [(await asked).json()["version"] for asked in (first, second, other, new)] == [0, 0, 1, 1]

    async def test_a_replica_that_gets_requests_while_another_drains(self):
        """The barrier is reached when nothing is in flight to any replica at one moment."""
        async with updatable_fleet(2) as (front, fakes):
            for one in fakes:
                one.release.clear()
            asking = [ask(front, "g", [0] * 9), ask(front, "h", [1] * 9)]
            await eventually(lambda: [one.running for one in fakes] == [1, 1])
            updating = asyncio.ensure_future(update(front))
            await front.until(fakes[0].fake, Status.UPDATING)
            fakes[0].release.set()
            await eventually(lambda: not fakes[0].running)
            fakes[0].release.clear()
            asking.append(ask(front, "g", [2] * 9))
            await eventually(lambda: sum(one.running for one in fakes) == 2)
            late = next((one for one in fakes if len(one.fake.requests) == 2), fakes[0])
            other = next(one for one in fakes if one is not late)
            other.release.set()
            await eventually(lambda: not other.running)
            await asyncio.sleep(0.05)
            assert not any(one.is_asked for one in fakes)
            late.release.set()
            assert (await updating).status_code == 200
            assert [(await one).json()["version"] for one in asking] == [0, 0, 0]
            assert not any(one.mixed for one in fakes)

    async def test_a_group_waits_for_what_becomes_of_its_replica(self):
        """If the update fails it goes on, else it ends with an error."""
        async with updatable_fleet(1) as (front, (one,)):
            assert (await ask(front)).json()["version"] == 0
            for fails, status in ((503, 200), (None, 409)):
                one.fake.holds[PATH] = asyncio.Event()
                one.write_fails = fails
                count = len(one.calls)
                updating = asyncio.ensure_future(update(front))
                await eventually(lambda count=count: len(one.calls) > count)
                asking = ask(front)
                await eventually(lambda: front.coordination.gate.waiting == 1)
                one.fake.holds[PATH].set()
                await updating
                assert (await asking).status_code == status

    async def test_a_retry_stays_with_the_version(self):
        """A request whose replica fails is not answered by another version, unless nothing of its group has been."""
        async with updatable_fleet(2) as (front, fakes):
            first = (await ask(front)).json()["by"]
            begun = next(one for one in fakes if one.fake.name == first)
            other = next(one for one in fakes if one is not begun)
            other.write(7)
            instances = frozenset(one.fake.beat["instance"] for one in fakes)
            front.coordination.fleet.groups.updating = instances  # two versions at once
            await front.coordination.fleet.look_again()
            begun.fails_with = 500
            answer = await ask(front)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, f"{first} refuses")
            assert not other.fake.requests
            answers = [(await ask(front, f"new {n}", [n] * 9)).json()["version"] for n in range(4)]
            assert answers == [7] * 4
            assert begun.fake.requests[2:], "some were tried there first"

    async def test_tenants_have_groups_of_their_own(self, tmp_path):
        (tmp_path / "keys").write_text("alice\nbob\n")
        (tmp_path / "admin").write_text("admin")
        files = {"api_key_file": str(tmp_path / "keys"), "admin_key_file": str(tmp_path / "admin")}
        async with updatable_fleet(1, **files) as (front, (one,)):
            alice, bob, admin = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob", "admin"))
            assert (await ask(front, **alice)).json()["version"] == 0
            answer = await front.http.post(PATH, json={"model_path": "new"}, headers=admin)
            assert (answer.status_code, one.version) == (200, 1)
            assert (await ask(front, **alice)).status_code == 409
            assert (await ask(front, **bob)).json()["version"] == 1

    @pytest.mark.parametrize("name", ["", "x" * (LONGEST_NAME + 1)])
    async def test_wrong_names(self, name):
        async with updatable_fleet(1) as (front, _):
            answer = await ask(front, name)
            assert answer.status_code == 400
            assert GROUP_HEADER in answer.text


async def played(seed: int, rollout: str, *, is_named: bool) -> dict[int, set[int]]:
    """Versions of the answers of each of 12 groups of 4, asked one after the other while a fleet is updated twice."""
    dice = random.Random(seed)
    seen: dict[int, set[int]] = defaultdict(set)
    async with updatable_fleet(3, replica_timeout=2 * PATIENCE) as (front, fakes):

        async def sampled(group: int) -> None:
            await asyncio.sleep(dice.random() * 0.5)
            for sample in range(4):
                answer = await ask(front, str(group) if is_named else None, [group, sample] * 5)
                assert answer.status_code in (200, 409), answer.text
                seen[group] |= {answer.json()["version"]} if answer.status_code == 200 else set()
                await asyncio.sleep(dice.random() * 0.3)

        async def trained() -> None:
            for path in ("one", "two"):
                await asyncio.sleep(dice.random() * 0.3)
                assert (await update(front, rollout=rollout, model_path=path)).status_code == 200

        async def delayed(fake, exchange, answer) -> None:
            await asyncio.sleep(dice.random() * 0.2)
            await answer(fake, exchange)

        for one in fakes:
            one.fake.behave = lambda fake, exchange, answer=one.fake.behave: delayed(fake, exchange, answer)
        with mock.patch.object(fleet, "LONGEST_PROBE", PATIENCE):  # on a busy machine replicas are late, not silent
            await asyncio.gather(trained(), *map(sampled, range(12)))
            await sampled(12)
        assert not any(one.mixed for one in fakes), "no answer of two versions"
        await front.check_idle()
    return seen


@pytest.mark.long
@pytest.mark.parametrize("rollout", ["barrier", "rolling"])
async def test_groups_of_one_version_in_any_order(rollout):
    """Seeded interleavings of requests and updates; the same requests without names get versions mixed."""
    for seed in range(2):
        named = await played(seed, rollout, is_named=True)
        assert all(len(versions) <= 1 for versions in named.values()), (seed, named)
        assert named[12] == {2}
        assert set().union(*named.values()) > {2}, "before and after"
    unnamed = await played(0, rollout, is_named=False)
    assert any(len(versions) > 1 for versions in unnamed.values())
