"""KV-7: several replicas in one world skip what one rank would, by knowledge of what each caches and is about to."""

from __future__ import annotations

import random

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.detokenizer import StopWordMatcher
from tests.unit_tests.support.replicas import Replicas

PREFIX = 320
ORDERS = {"pairs": "AABB" * 4, "in turn": "AB" * 8, "one after the other": "A" * 8 + "B" * 8}
for _seed in range(1):
    ORDERS[f"random {_seed}"] = "".join(random.Random(_seed).sample("AB" * 8, 16))
POLICIES, SLOTS = ("least_computed", "longest_prefix"), (None, 64)  # slots of models without and with states
PAIRS = [  # each order with a policy; each policy with and without states
    pytest.param(order, POLICIES[i % 2], SLOTS[i // 2 % 2], id=f"{name}-{POLICIES[i % 2]}-{SLOTS[i // 2 % 2]}")
    for i, (name, order) in enumerate(ORDERS.items())
]


def prefix(name: str) -> list[int]:
    return [1000 * ord(name) + i for i in range(PREFIX)]


def prompts(order: str, tail: int = 40) -> list[list[int]]:
    return [[*prefix(name), *(tail * i + j for j in range(tail))] for i, name in enumerate(order)]


class TestSkippedTokens:
    @pytest.mark.parametrize(("order", "policy", "slots"), PAIRS)
    def test_one_request_a_step(self, order: str, policy: str, slots: int | None):
        """KV-7: two replicas skip at least 0.9 of what one rank skips, in any order; so with answers of 64 tokens."""
        skipped = []
        for count in (1, 2):
            world = Replicas(count, RoutingConfig(policy), slots=slots)
            for prompt in prompts(order):
                world.add(prompt, 64)
                world.step()
            world.run()
            skipped.append(world.skipped)
        assert skipped[0] == 14 * PREFIX
        assert skipped[1] >= 0.9 * skipped[0]

    @pytest.mark.parametrize(("order", "policy", "slots"), PAIRS)
    def test_all_at_once(self, order: str, policy: str, slots: int | None):
        """KV-7: nothing is cached when they are routed; at least 0.7 of one rank's.

        With `least_computed` no replica idles while another has more than two steps of work queued.
        """
        world = Replicas(2, RoutingConfig(policy), slots=slots, max_tokens=512)
        for prompt in prompts(order):
            world.add(prompt, 8)
        while world.core.is_busy:
            computed = world.step()
            queued = [
                sum(len(one.tokens) - one.computed_end for one in replica.scheduler.queues)
                for replica in world.core.replicas
            ]
            if policy == "least_computed" and 0 in computed:
                assert max(queued) <= 2 * world.limits.max_tokens
        assert world.skipped >= 0.7 * 14 * PREFIX

    def test_a_policy_of_megatron_follows_its_scores_where_a_replica_idles(self):
        """KV-7: a match of the whole prefix outweighs fifteen requests of 64; the other replica gets nothing."""
        world = Replicas(2, RoutingConfig("longest_prefix"), max_requests=64)
        assert [world.add(prompt) for prompt in prompts("A" * 16)] == [0] * 16

    def test_answers_of_128_tokens_do_not_split_a_prefix(self):
        """KV-7: what is yet to be generated weighs less than a prefix that would be computed again."""
        world = Replicas(2)
        for prompt in prompts("A" * 8):
            assert world.add(prompt, 128) == 0
            world.step()


class TestKnowledge:
    """The router knows of a cache what the scheduler knows: `Replicas.check` compares the two after every step."""

    def test_what_was_evicted_draws_nothing(self):
        """KV-7: blocks that other prompts have replaced are forgotten at once."""
        world = Replicas(2, total_blocks=16)
        first = list(range(800))
        assert world.add(first, 1) == 0
        world.run()
        assert world.add(first, 1) == 0
        world.run()
        for i in range(1, 5):
            world.add(range(5000 * i, 5000 * i + 900), 1, replica_index=0)
            world.run()
        world.add(range(60_000, 60_900), 1, replica_index=1)
        assert world.add(first, 1) == 0, "replica 1 is busy"
        assert world.add(first, 1) == 0, "it is about to be cached there"
        world.run()
        assert world.core.replicas[0].scheduler.counters.skipped_tokens > 0

    @pytest.mark.parametrize("options", [{"return_log_probs": True}, {"enable_prefix_caching": False}])
    def test_a_prompt_that_reads_nothing_goes_where_the_least_is_queued(self, options: dict[str, bool]):
        """KV-7: a request for log-probs of its prompt, or without the cache, computes all of it anywhere."""
        world = Replicas(2)
        tokens = list(range(640))
        assert world.add(tokens, 1) == 0
        world.run()
        assert world.add(tokens, 64) == 0
        world.step()
        if "return_log_probs" in options:
            options = options | {"skip_prompt_log_probs": False}
        assert world.add(tokens, 1, **options) == 1
        world.run()

    @pytest.mark.parametrize("alternatives", [0, 2])
    def test_prompts_whose_log_probs_are_kept_go_where_they_are(self, alternatives: int):
        """KV-7, RL-10: a request for the log-probs of its prompt alone reads the cache, too."""
        world = Replicas(2, keeps_log_probs=True)
        tokens, scored = list(range(640)), {"return_log_probs": True, "skip_prompt_log_probs": False}
        assert world.add(tokens, 1, **scored) == 0
        world.run()
        assert world.add(tokens, 1, **scored, top_n_logprobs=alternatives) == int(alternatives > 0)
        world.run()

    @pytest.mark.parametrize(
        ("change", "slots"),
        [("reset_prefix_cache", 64), ("weights_changed", 64), ("suspend", None), ("reset_prefix_cache", None)],
    )
    def test_an_emptied_cache_draws_nothing(self, change: str, slots: int | None):
        """KV-7, EX-4: what was cached or is being computed will not be found again; what waits will be."""
        world = Replicas(2, slots=slots)
        tokens = list(range(640))
        world.add(tokens, 1)
        world.run()
        world.add([*tokens, 1], 64)
        world.step()
        getattr(world.core, change)()
        world.check()
        if change != "reset_prefix_cache":  # the request computes all of its prompt again
            world.core.resume()
            assert world.add([*tokens, 2], 1) == 0
        else:
            assert world.add([*tokens, 2], 1) == 1
        world.run()
        world.check()

    def test_requests_that_end_early_are_no_load(self):
        """KV-7: aborted requests and those that no replica can serve are forgotten."""
        world = Replicas(2)
        world.add(range(3000), 500)
        request = world.core.output.get(0)
        assert world.add(range(100, 200), 1) == 1
        world.core.output.abort(request)
        assert world.add(range(world.limits.max_sequence_length + 1), 1) == -1
        world.run()
        assert not any(map(world.core._choice._router.load, "01"))
        assert not world.core._choice._in_flight

    def test_a_request_that_cannot_be_added_is_no_load(self, monkeypatch):
        """KV-7: its id can be used again."""
        world = Replicas(2)
        world.add(range(90), 4)
        world.run()
        inputs = RequestInputs(tuple(range(90)), RequestParams(8, stop_words=("<7>",)), continued=world.records[0])
        with monkeypatch.context() as patch:
            patch.setattr(StopWordMatcher, "feed", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                world.core.add(1, inputs)
        assert not any(map(world.core._choice._router.load, "01"))
        world.core.add(1, inputs)

    def test_a_caller_that_names_the_replica_gets_it(self):
        """KV-7: a named replica goes before the policy, and counts as load."""
        world = Replicas(2)
        given = [world.add(range(100 * i, 100 * i + 90), replica_index=index) for i, index in enumerate((4, 0, 3))]
        assert given == [0, 0, 1]
        assert world.add(range(900, 990)) == 1
