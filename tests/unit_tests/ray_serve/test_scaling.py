"""Rules of scaling: how many replicas a load needs, which of them leaves, and when."""

from __future__ import annotations

import pytest

from megatron_ext.ray_serve.autoscaling import (
    ReplicaLoad,
    demand,
    is_worth_least,
    replicas_wanted,
    retiring,
    stop_order,
)

TOKENS = 1000  # waiting tokens of a replica


def loads(*waiting: float, requests: float = 0) -> list[ReplicaLoad]:
    """Replicas a, b, ... that started in this order, each with so many waiting tokens."""
    return [
        ReplicaLoad(name, tokens, requests, capacity=10, started=i)
        for i, (name, tokens) in enumerate(zip("abcdef", waiting, strict=False))
    ]


@pytest.mark.parametrize(
    ("waiting", "requests", "current", "wanted"),
    [
        ((), 0, 2, 2),
        ((1000,), 0, 1, 1),
        ((1001,), 0, 1, 2),
        ((5000, 500), 0, 2, 6),
        ((0, 0, 0), 0, 3, 2),
        ((300, 400), 0, 2, 1),
        ((0, 0), 4, 2, 2),
        ((0, 0), 3, 2, 1),
        ((0, 0), 11, 2, 3),
    ],
)
def test_replicas_wanted(waiting, requests, current, wanted):
    """RP-6: more replicas at once, fewer one by one; requests that only generate need replicas as well."""
    assert replicas_wanted(loads(*waiting, requests=requests), TOKENS, current) == wanted


def test_a_fleet_does_not_swing():
    """RP-6: after each change, the same load wants no other change."""
    for waiting in range(0, 8000, 50):
        current = replicas_wanted(loads(waiting), TOKENS, 4)
        while (then := replicas_wanted(loads(waiting), TOKENS, current)) != current:
            assert then < current, "only shrinking takes several steps"
            current = then
        assert demand(loads(waiting), TOKENS) <= current


def test_the_emptiest_node_stops_first_then_the_newest_replica():
    """RP-6: as Ray's scheduler chooses."""
    fleet = [
        ReplicaLoad(name, 0, 0, 1, started=i, node="far" if name == "b" else "near") for i, name in enumerate("abcd")
    ]
    assert stop_order(fleet) == ["b", "d", "c", "a"]


def test_the_next_replica_to_leave_retires():
    """RP-6: only while one is too many, and never the last of those that must stay."""
    assert retiring(loads(0, 0, 0), TOKENS, fewest=1) == {"c"}
    assert retiring(loads(0, 0, 0), TOKENS, fewest=3) == frozenset()
    assert retiring(loads(700, 800, 0), TOKENS, fewest=1) == frozenset()
    assert retiring(loads(9000, 0, 0), TOKENS, fewest=1) == frozenset()
    assert retiring([], TOKENS, fewest=1) == frozenset()


def test_worth_of_a_cache():
    """RP-6: a replica may leave once its cache spared no more than the average."""
    fleet = [ReplicaLoad(name, 0, 0, 1, spared_tokens=spared) for name, spared in (("a", 300), ("b", 100), ("c", 200))]
    assert [is_worth_least(fleet, name) for name in "abc"] == [False, True, True]
    assert is_worth_least(loads(0, 0), "b"), "no cache spares anything"
