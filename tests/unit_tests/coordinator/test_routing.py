"""RP-2, RP-3: requests go where their prefix is, tenants apart; what is remembered is bounded."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex
from megatron_ext.coordinator.routed_request import RoutedPrompt
from megatron_ext.routing.router import Router
from megatron_ext.server.api_keys import caller_of
from tests.unit_tests.support.fleet import FakeReplica, coordinator, error, fleet


async def sent_to(front, prompt, **fields) -> str:
    return (await front.complete(prompt, **fields)).json()["by"]


class TestAffinity:
    async def test_turns_of_a_conversation_stay_where_the_first_one_was(self):
        """Texts and conversations too, whose tokens a replica makes."""
        async with fleet(3) as (front, fakes):
            homes = [await sent_to(front, f"{number} is the beginning of it") for number in range(6)]
            assert set(Counter(homes).values()) == {2}, "unknown prompts spread evenly"
            for number in (4, 1, 5, 0, 3, 2):
                assert await sent_to(front, f"{number} is the beginning of it, and so on") == homes[number]
            for messages in ([{"role": "user", "content": "What?"}], [{"role": "user", "content": "Who?"}]):
                body = {"messages": messages, "tools": [], "chat_template_kwargs": {"a": 1}}
                chosen = {(await front.http.post("/v1/chat/completions", json=body)).json()["by"] for _ in range(3)}
                assert len(chosen) == 1
            questions = [one.body for fake in fakes for one in fake.others if one.path == "/tokenize"]
            assert body in questions, "the template is told all that it will be told"

    async def test_ids_and_lists_of_prompts(self):
        async with fleet(2) as (front, fakes):
            home = await sent_to(front, list(range(20)))
            other = next(fake.name for fake in fakes if fake.name != home)
            assert await sent_to(front, list(range(100, 120))) == other
            assert await sent_to(front, [list(range(20)), [1, 2]]) == home
            assert not any(one.path == "/tokenize" for fake in fakes for one in fake.others)
            for nonsense in ([-1], [2**40], ["a", 1], {}, 5, [], [[]]):
                assert (await front.complete(nonsense)).status_code == 200, "what is wrong the replica says"

    async def test_round_robin_looks_at_nothing(self):
        async with fleet(2, policy="round_robin") as (front, fakes):
            chosen = [await sent_to(front, "the same") for _ in range(6)]
            assert Counter(chosen) == {fake.name: 3 for fake in fakes}
            assert not any(one.path == "/tokenize" for fake in fakes for one in fake.others)

    async def test_an_opt_out_leaves_nothing_and_finds_nothing(self):
        async with fleet(2) as (front, _):
            await front.complete(list(range(40)), enable_prefix_caching=False)
            assert sum(view.blocks for view in front.coordination.router.replicas()) == 0

    async def test_refused_prompts_are_not_cached(self):
        """TE-6: a prompt that was answered with 400 was not computed."""
        async with fleet(2) as (front, fakes):
            for fake in fakes:
                fake.behave = error(400, "context_length_exceeded")
            assert (await front.complete(list(range(40)))).status_code == 400
            assert [view.blocks for view in front.coordination.router.replicas()] == [0, 0]

    async def test_a_replica_that_cannot_tokenize_costs_the_affinity_alone(self):
        async with fleet(2, replica_timeout=0.6) as (front, fakes):
            fakes[0].is_frozen = True
            assert await sent_to(front, "text") == fakes[1].name


class TestTenants:
    async def test_salts_and_keys_keep_prefixes_apart(self):
        """A replica's keys make its salts: the same prompt of another tenant is another one."""
        prompt = list(range(40))
        replica = await FakeReplica(beat={"has_keys": True}).start()
        second = await FakeReplica(name="second", beat={"has_keys": True}).start()
        async with coordinator(replica, second) as front:
            router = front.coordination.router

            def known() -> list[int]:
                return [view.blocks for view in router.replicas()]

            for key, salt, blocks in (
                ("a", None, 10),
                ("a", None, 10),
                ("b", None, 20),
                ("b", "s", 30),
                ("a", "s", 40),
            ):
                fields = {} if salt is None else {"cache_salt": salt}
                await front.complete(prompt, headers={"authorization": f"Bearer {key}"}, **fields)
                assert sum(known()) == blocks
            mine = RoutedPrompt.of(prompt, caller_of("a").bind("s")).prompt
            assert router.route(mine).skipped == 39
            assert router.route(RoutedPrompt.of(prompt, caller_of("c").bind("s")).prompt).skipped == 0
        await replica.stop()
        await second.stop()

    async def test_keys_of_the_coordinator_alone_become_salts(self, tmp_path):
        """Replicas without keys cannot tell tenants apart; what they are told can."""
        (tmp_path / "keys").write_text("alice\nbob\n")
        async with fleet(1, api_key_file=str(tmp_path / "keys")) as (front, fakes):
            assert (await front.complete()).status_code == 401
            for key in ("alice", "bob"):
                await front.complete(headers={"authorization": f"Bearer {key}"}, cache_salt="s")
            salts = [one.body["cache_salt"] for one in fakes[0].requests]
            assert salts == [caller_of(key).bind("s") for key in ("alice", "bob")]


class TestRemembered:
    @pytest.mark.parametrize("has_states", [False, True])
    def test_never_more_than_the_pool_and_never_a_hole(self, has_states):
        """RP-3: the invariant holds after each of 300 prompts with common beginnings."""
        dice, size, most = random.Random(2), 4, 12
        router = Router(RoutingConfig())
        router.join("r", size, has_states=has_states)
        memory = ApproximatePrefixIndex(router, "r", size, most, has_states=has_states)
        for _ in range(300):
            tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 70))]
            routed = RoutedPrompt.of(tokens, dice.choice((None, "salt")))
            memory.answered(routed)
            (view,) = router.replicas()
            assert view.blocks == len(memory) <= most
            kept = min(len(tokens) // size, most) * size
            expected = min(kept, len(tokens) - 1)
            if has_states:  # the snapshot is at the last boundary, if that is remembered
                boundary = (len(tokens) - 1) // size * size
                expected = boundary if boundary <= kept else router.route(routed.prompt).skipped
            assert router.route(routed.prompt).skipped == expected
            router.check()
        memory.cleared()
        assert router.replicas()[0].blocks == 0

    async def test_a_reset_is_for_all_and_forgets(self):
        async with fleet(2) as (front, fakes):
            for number in range(2):
                await front.complete([number] * 40)
            assert [view.blocks for view in front.coordination.router.replicas()] == [10, 10]
            fakes[1].statuses["/reset_prefix_cache"] = 403
            answer = await front.http.post("/reset_prefix_cache")
            assert answer.status_code == 403
            assert set(answer.json()["replicas"]) == {fake.url for fake in fakes}
            assert [view.blocks for view in front.coordination.router.replicas()] == [0, 10]
            fakes[1].statuses.clear()
            assert (await front.http.post("/reset_prefix_cache")).status_code == 200
            assert [view.blocks for view in front.coordination.router.replicas()] == [0, 0]

    @pytest.mark.parametrize(
        ("path", "is_left"),
        [
            *((path, 0) for path in ("/reset_prefix_cache", "/flush_cache", "/sleep")),
            *((path, 10) for path in ("/abort", "/wake_up")),
        ],
    )
    async def test_routes_that_empty_caches_empty_the_index(self, path, is_left):
        """TE-6: each route after which a replica's cache is empty, and no other."""
        async with fleet(2) as (front, _):
            await front.complete(list(range(40)))
            assert (await front.http.post(path)).status_code == 200
            assert sum(view.blocks for view in front.coordination.router.replicas()) == is_left
