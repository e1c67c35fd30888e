"""Invariants of a router between the replicas, their index entries, and the requests in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from megatron_ext.routing.choosing import Fleet
from megatron_ext.routing.replica_state import InFlightRequest, Replica


def check_router(fleet: Fleet, replicas: Mapping[str, Replica], in_flight: Mapping[Hashable, InFlightRequest]) -> None:
    """Assert that only joined replicas are indexed, and that loads and claims match the requests in flight."""
    assert sum(fleet.members.values()) == sum(one.bit for one in replicas.values()), (
        "a replica is in no index, or in two"
    )
    assert fleet.indexes.keys() == fleet.members.keys(), "an index without replicas"
    for index in fleet.indexes.values():
        index.check()
        replicas_of_index = sum(one.bit for one in replicas.values() if one.index is index)
        assert not index.having() & ~replicas_of_index, "an index entry of a replica that is not in it"
    for one in replicas.values():
        own = [sent for sent in in_flight.values() if sent.replica == one.name]
        assert len(own) == len(one.in_flight), f"requests in flight to {one.name}"
        own_load = sum(sent.tokens for sent in own)
        assert fleet.loads.load(one.number) == one.others + own_load, f"load of {one.name}"
        claimed = Counter(key for sent in own for key in sent.claimed)
        assert one.index.claimed.counts(one.bit) == claimed, f"claims of {one.name}"
        one.check()
