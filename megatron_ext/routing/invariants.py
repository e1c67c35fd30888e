"""Invariants of a router between the replicas, their index entries, and the requests in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from megatron_ext.routing.choosing import Fleet
from megatron_ext.routing.replica_state import Flight, Replica


def check_router(fleet: Fleet, replicas: Mapping[str, Replica], flights: Mapping[Hashable, Flight]) -> None:
    """Assert that only joined replicas are indexed, and that loads and claims are those of the requests in flight."""
    assert sum(fleet.members.values()) == sum(one.bit for one in replicas.values()), (
        "a replica is in no index, or in two"
    )
    assert fleet.indexes.keys() == fleet.members.keys(), "an index without replicas"
    for index in fleet.indexes.values():
        index.check()
        replicas_of_index = sum(one.bit for one in replicas.values() if one.index is index)
        assert not index.having() & ~replicas_of_index, "an index entry of a replica that is not in it"
    for one in replicas.values():
        own_flights = [flight for flight in flights.values() if flight.replica == one.name]
        assert len(own_flights) == len(one.in_flight), f"requests in flight to {one.name}"
        own_load = sum(flight.tokens for flight in own_flights)
        assert fleet.loads.load(one.number) == one.others + own_load, f"load of {one.name}"
        claimed = Counter(key for flight in own_flights for key in flight.claimed)
        assert one.index.claimed.counts(one.bit) == claimed, f"claims of {one.name}"
        one.check()
