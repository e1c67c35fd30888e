"""RP-7: the simulated fleet, and what the router is worth in front of it."""

from __future__ import annotations

import pytest

from benchmarks.routing.balancers import BALANCERS, CostRule, Ours
from benchmarks.routing.world import Scale, World


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
