"""What must hold of a router at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from megatron_ext.routing.choosing import Fleet
from megatron_ext.routing.replica import Flight, Replica


def check_router(fleet: Fleet, replicas: Mapping[str, Replica], flights: Mapping[Hashable, Flight]) -> None:
    """Assert that nothing is known of who is not there, and that loads and claims are those of the flights."""
    assert fleet.open == sum(one.bit for one in replicas.values() if one.is_open), "who is open"
    assert sum(fleet.members.values()) == sum(one.bit for one in replicas.values()), "somebody is in no index, or twice"
    assert fleet.indexes.keys() == fleet.members.keys(), "an index of nobody"
    for index in fleet.indexes.values():
        index.check()
        there = sum(one.bit for one in replicas.values() if one.index is index)
        assert not index.having() & ~there, "something is known of who is not there"
    for one in replicas.values():
        mine = [flight for flight in flights.values() if flight.replica == one.name]
        assert len(mine) == len(one.in_flight), f"requests in flight to {one.name}"
        assert fleet.loads.load(one.number) == sum(flight.tokens for flight in mine), f"load of {one.name}"
        claimed = Counter(key for flight in mine for key in flight.claimed)
        assert one.index.claimed.counts(one.bit) == claimed, f"claims of {one.name}"
        one.check()
