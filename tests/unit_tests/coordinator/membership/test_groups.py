"""RP-2, RP-5, RP-9: replicas of another model stay out; several models are routed by name; weights are a version."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from arguments import parse_coordinator_arguments
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.errors import ConfigError
from tests.unit_tests.support.fleet import FakeReplica, coordinator, eventually


@contextlib.asynccontextmanager
async def replicas(*beats: dict[str, object]):
    fakes = [await FakeReplica(name=f"fake {number}", beat=beat).start() for number, beat in enumerate(beats)]
    try:
        yield fakes
    finally:
        for fake in fakes:
            await fake.stop()


def problem(front, fake) -> str:
    return next(row["problem"] for row in front.coordination.rows() if row["url"] == fake.url)


class TestIdentity:
    @pytest.mark.parametrize("field", ["model", "configuration", "tokenizer"])
    async def test_a_replica_of_another_model_is_refused_at_join(self, caplog, field):
        async with replicas({}, {field: "other"}) as (first, other), coordinator(first) as front:
            front.coordination.fleet.add(other.url, first_source(front))
            await front.until(other, Status.REFUSED)
            text = problem(front, other)
            assert "'fake'" in text
            assert "other" in text
            assert f"{other.url} is refused: {text}" in caplog.text
            for number in range(6):
                assert (await front.complete([number] * 9)).json()["by"] == first.name
            assert (await front.http.get("/health")).json()["replicas"] == {"ready": 1, "refused": 1}
            other.beat[field] = first.beat[field]
            await front.until(other, Status.READY)

    async def test_a_replica_that_becomes_another_model_is_refused_at_its_heartbeat(self):
        """Also without a restart; requests in flight run on another replica."""

        async def never(fake, exchange):
            await asyncio.Event().wait()

        async with replicas({}, {}) as (one, two), coordinator(one, two) as front:
            one.behave = two.behave = never
            asking = [asyncio.ensure_future(front.complete([number] * 9)) for number in range(2)]
            await eventually(lambda: len(two.requests) == 1 and len(one.requests) == 1)
            two.beat["configuration"] = "other"
            await front.until(two, Status.REFUSED)
            assert [view.name for view in front.coordination.router.replicas()] == [one.url]
            await eventually(lambda: len(one.requests) == 2)
            for task in asking:
                task.cancel()

    async def test_a_group_ends_with_its_last_replica(self):
        """A replica of another model takes over where no replica of the first one is left."""
        async with replicas({}) as (one,), coordinator(one, replica_timeout=0.5) as front:
            one.beat["model"] = "another"
            one.restart()
            await eventually(lambda: front.coordination.fleet.groups.names == ["another"])
            await front.until(one, Status.READY)

    async def test_the_served_groups_are_set_by_a_flag(self):
        async with replicas({"model": "wrong"}, {}) as fakes, coordinator(*fakes, model=("fake",)) as front:
            wrong, right = fakes
            assert front.status(wrong) is Status.REFUSED
            assert front.status(right) is Status.READY
            assert "see --model" in problem(front, wrong)

    def test_the_flag(self):
        words = "--replica http://a --model one --model two"
        assert parse_coordinator_arguments(words.split()).coordinator.model == ("one", "two")
        with pytest.raises(ConfigError, match="--model is empty"):
            parse_coordinator_arguments(["--replica", "http://a", "--model", ""])


class TestSeveralGroups:
    async def test_requests_go_to_their_model(self):
        small, large = {"model": "small"}, {"model": "large", "configuration": "l", "tokenizer": "other"}
        names = ("small", "large")
        async with replicas(small, small, large) as fakes, coordinator(*fakes, model=names) as front:
            for number in range(6):
                answer = await front.complete(f"{number} times", model="large")
                assert answer.json()["by"] == fakes[2].name
                answer = await front.complete(f"{number} times", model="small")
                assert answer.json()["by"] != fakes[2].name
            assert not [one for one in fakes[2].others if one.path == "/tokenize"], "one replica has nothing to compare"
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
                await front.http.post(path, json={"model": "large", **body})
                assert fakes[2].others[-1].path == path
            for body in ({}, {"model": None}, {"model": 5}):
                answer = await front.complete(**body)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            answer = await front.complete(model="huge")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert "'small', 'large'" in answer.json()["error"]["message"]
            await fakes[2].stop()
            assert (await front.complete(model="large")).status_code == 503
            assert (await front.complete(model="small")).status_code == 200
            await front.check_idle()

    async def test_all_are_listed(self):
        large = {"model": "large", "configuration": "l"}
        async with replicas({}, large) as fakes, coordinator(*fakes, model=("fake", "large")) as front:
            for fake in fakes:
                fake.answers_with["/v1/models"] = {"object": "list", "data": [{"id": fake.beat["model"]}]}
            listed = (await front.http.get("/v1/models")).json()
            assert listed == {"object": "list", "data": [{"id": "fake"}, {"id": "large"}]}
            assert (await front.http.get("/v1/models/large")).json() == {"by": fakes[1].name}
            assert (await front.http.get("/v1/models/none")).status_code == 404

    async def test_tokenizers_are_told_apart(self):
        large = {"model": "large", "tokenizer": "l"}
        async with replicas({}, large) as fakes, coordinator(*fakes, model=("fake", "large")) as front:
            for fake in fakes:
                answer = await front.http.get("/tokenizer_info", params={"model": fake.beat["model"]})
                assert answer.json() == {"by": fake.name}
            for query, status in (("", 400), ("?model=none", 404), ("?model=fake&model=large", 400)):
                answer = await front.http.get(f"/tokenizer_info{query}")
                assert (answer.status_code, answer.json()["error"]["param"]) == (status, "model")
        async with replicas({}) as fakes, coordinator(*fakes) as front:
            assert (await front.http.get("/tokenizer_info")).json() == {"by": fakes[0].name}

    async def test_one_group_needs_no_name(self):
        async with replicas({}, {}) as fakes, coordinator(*fakes) as front:
            assert (await front.complete()).status_code == 200
            assert (await front.complete(model="fake")).status_code == 200
            assert (await front.complete(model="other")).status_code == 404
            assert sum(len(fake.requests) for fake in fakes) == 2


class TestWeights:
    async def test_other_weights_are_drained_and_shown(self, caplog):
        """The version that most replicas have counts, and of equals the one that joined first."""
        async with replicas({}, {}, {"weights": "v2"}) as fakes, coordinator(*fakes, replica_timeout=1.0) as front:
            await front.until(fakes[2], Status.OUTDATED)
            assert {(await front.complete([number] * 9)).json()["by"] for number in range(6)} == {"fake 0", "fake 1"}
            rows = (await front.http.get("/replicas")).json()["replicas"]
            assert [row["weights"] for row in rows] == ["w", "w", "v2"]
            assert "weights" in problem(front, fakes[2])
            assert f"{fakes[2].url} drains" in caplog.text
            fakes[1].beat["weights"] = "v2"
            await front.until(fakes[0], Status.OUTDATED)
            await front.until(fakes[1], Status.READY)  # a late answer to a heartbeat may come between
            await front.until(fakes[2], Status.READY)
            fakes[0].beat["weights"] = "v2"
            await front.until(fakes[0], Status.READY)

    async def test_an_announced_update_drains_none(self):
        """Replicas update one after the other while requests go on; those that still differ later are drained."""
        async with replicas({}, {}) as fakes, coordinator(*fakes, replica_timeout=1.0) as front:
            fleet = front.coordination.fleet
            with fleet.weights_update(fleet.members.values()):
                fakes[1].beat["weights"] = "v2"
                await fleet.look_again()
                assert fleet.members[fakes[1].url].beat.weights == "v2"
                assert [front.status(fake) for fake in fakes] == [Status.READY] * 2
            await front.until(fakes[1], Status.OUTDATED)


def first_source(front):
    return next(iter(front.coordination.fleet.members.values())).source
