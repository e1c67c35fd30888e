"""RP-7: the simulated fleet, and what the router is worth in front of it."""

from __future__ import annotations

import pytest

from benchmarks.cases import Run
from benchmarks.routing import fleet
from benchmarks.routing.balancers import BALANCERS, CostRule, Ours
from benchmarks.routing.world import Scale, World
from megatron_ext.routing.prompt import Prompt


@pytest.mark.parametrize("name", BALANCERS)
def test_every_request_is_served_though_replicas_die(name):
    """Each turn has its first token with every rule, retried turns too, and the counters balance."""
    scale = Scale(6, 250, capacity=900, failures=0.5)
    balancer = BALANCERS[name](6)
    world = World(scale, balancer)
    outcome = world.run()
    assert len(world.served) == len(set(world.served)) == 250
    assert len(outcome.firsts) >= 250
    assert outcome.retried > 0
    assert sum(outcome.computed) >= outcome.prompt_units - outcome.skipped_units
    for replica in world.replicas:
        assert not replica.present
        assert not replica.used
        assert replica.free + len(replica.idle) == replica.capacity
    if isinstance(balancer, Ours):
        balancer.router.check()
        assert not any(balancer.router.load(one.name) or one.in_flight for one in balancer.router.members.values())
        held = {one.name: len(one.blocks) for one in balancer.router.members.values()}
        assert held == {str(one.number): len(one.idle) for one in world.replicas}
    if isinstance(balancer, CostRule):
        assert not balancer._active.bits
        assert abs(balancer._decode).max() == abs(balancer._prefill).max() == 0


def test_the_router_skips_more_than_taking_turns():
    """RP-2: the comparison uses equal traffic."""
    shares = {
        name: World(Scale(8, 600), BALANCERS[name](8)).run().skipped for name in ("round_robin", "least_computed")
    }
    assert shares["least_computed"] > shares["round_robin"] + 0.3


def test_two_replicas_skip_as_much_as_one_with_twice_the_memory():
    """RP-2: without load, chats run one turn after the other; within two points if caches are too small."""
    shares = []
    for replicas, capacity in ((1, 1600), (2, 800)):
        scale = Scale(replicas, 500, capacity=capacity, offered=0.02 / replicas, failures=0.0)
        shares.append(World(scale, Ours(replicas)).run().skipped)
    assert abs(shares[0] - shares[1]) < 0.02
    assert shares[0] < 0.95, "caches are large enough for all, so nothing was tested"


def test_rows():
    """Each rule has a row for each fleet."""
    run = Run()
    fleet.fleet(run, replicas=(2,), requests=40, rules=("round_robin", "least_computed"))
    rows = run.page["rows"]
    assert list(rows) == ["round_robin, 2 replicas", "least_computed, 2 replicas"]
    assert all(row["requests"] == 40 for row in rows.values())


def test_the_cost_rule_counts_blocks_once():
    """The second of two requests with equal prompts adds nothing to the blocks in use."""
    rule, prompt = CostRule(2), Prompt(range(10), "x")
    for request in ("a", "b"):
        rule.choose(prompt)
        rule.began(request, 0, prompt)
    assert rule._decode.tolist() == [10, 0]
    rule.ended("a", 1)
    assert rule._decode.tolist() == [10, 0]
    rule.ended("b", 1)
    assert rule._decode.tolist() == [0, 0]
