"""Scaling of a fleet by the prompt tokens that wait to be computed, as an autoscaling policy of Ray Serve.

A fleet grows as soon as its demand exceeds it, and shrinks by one replica at a time once the others would be filled to
`FILL` at most, so that it does not swing. The replica with the least valuable cache should leave; the value of a cache
is the number of tokens that it spared lately. Where the scheduler decides which replica leaves, routers start no new
conversation there (`retiring`), and the fleet shrinks once that replica's cache is worth no more than the average.

Ray's controller calls the policy, with what replicas return from `record_autoscaling_stats`, and applies the delays and
bounds of the autoscaling configuration to its result. Tried with Ray 2.60.0; nothing of Ray is imported here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

FILL = 0.7  # of the remaining replicas, at most, when one leaves


@dataclass(frozen=True)
class ReplicaLoad:
    """Load of a replica.

    Attributes:
        name: Name of the replica.
        waiting_tokens: Prompt tokens that wait to be computed.
        requests: Number of requests that have not ended.
        capacity: Number of requests that run at once.
        spared_tokens: Worth of its cache: prompt tokens that it spared lately.
        started: Time at which the replica started, in seconds.
        node: Name of its machine.
    """

    name: str
    waiting_tokens: float
    requests: float
    capacity: float
    spared_tokens: float = 0.0
    started: float = 0.0
    node: str = ""


def demand(loads: Collection[ReplicaLoad], tokens_per_replica: float) -> float:
    """Return the number of replicas that the load needs, as a fraction.

    Args:
        loads: Loads of all replicas.
        tokens_per_replica: Waiting tokens that a replica may have.
    """
    waiting = sum(one.waiting_tokens for one in loads)
    capacity = sum(one.capacity for one in loads) / len(loads) if loads else 1.0
    return max(waiting / tokens_per_replica, sum(one.requests for one in loads) / max(1.0, capacity))


def replicas_wanted(loads: Collection[ReplicaLoad], tokens_per_replica: float, current: int) -> int:
    """Return the number of replicas that a fleet should have: more, one fewer, or as many as now.

    Args:
        loads: Loads of all replicas; without any, nothing is known.
        tokens_per_replica: See `demand`.
        current: Number of replicas that the fleet has or is about to have.
    """
    if not loads:
        return current
    needed = demand(loads, tokens_per_replica)
    if needed > current:
        return math.ceil(needed)
    return current - 1 if current > 1 and needed <= FILL * (current - 1) else current


def stop_order(loads: Collection[ReplicaLoad]) -> Sequence[str]:
    """Return the names of replicas in the order in which Ray Serve 2.60 stops them: emptiest node first, then newest.

    Ray also counts replicas of other deployments on a node, and spares its head node; that is not known here.
    """
    on_node = Counter(one.node for one in loads)
    order = sorted(loads, key=lambda one: (on_node[one.node], one.node, -one.started, one.name))
    return [one.name for one in order]


def retiring(loads: Collection[ReplicaLoad], tokens_per_replica: float, fewest: int) -> frozenset[str]:
    """Return the replica that is the next to leave a fleet that is too large; none if it is not.

    Args:
        loads: Loads of all replicas.
        tokens_per_replica: See `demand`.
        fewest: Minimum number of replicas.
    """
    wanted = replicas_wanted(loads, tokens_per_replica, len(loads))
    return frozenset(stop_order(loads)[:1] if fewest <= wanted < len(loads) else ())


def is_worth_least(loads: Collection[ReplicaLoad], name: str) -> bool:
    """Return whether a replica's cache is worth no more than the caches are on average."""
    worths = {one.name: one.spared_tokens for one in loads}
    return worths[name] * len(worths) <= sum(worths.values())


POLICY = f"{__name__}:WaitingTokensPolicy"
_STATS = tuple(field.name for field in fields(ReplicaLoad) if field.name != "name")
_SINCE = "wanted_fewer_since"  # in the policy's state


class WaitingTokensPolicy:
    """Policy of a deployment.

    A fleet that is too large keeps its size, for `patience` at most, while the cache of the replica that Ray would stop
    spares more than the average: routers start no new conversations there meanwhile.

    Args:
        tokens_per_replica: Waiting prompt tokens that a replica may have.
        patience: Maximum time in seconds for the cache of the replica that leaves to lose its worth.
    """

    def __init__(self, tokens_per_replica: float, patience: float) -> None:
        self._tokens = tokens_per_replica
        self._patience = patience

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, object]]:
        """Return the number of replicas that the deployment should have, and the state of the policy."""
        loads = replica_loads(context)
        target = context.target_num_replicas
        wanted = replicas_wanted(loads, self._tokens, target)
        if wanted >= target or len(loads) < target:  # while one starts, or has not reported, none leaves
            return max(wanted, target), {}
        since = context.policy_state.get(_SINCE)
        began = since if isinstance(since, float) else context.current_time
        state: dict[str, object] = {_SINCE: began}
        is_due = context.current_time - began >= self._patience
        return wanted if is_due or is_worth_least(loads, stop_order(loads)[0]) else target, state


def replica_loads(context: AutoscalingContext) -> list[ReplicaLoad]:
    """Return the loads of the replicas that have reported: averages over the look-back period, and spared tokens.

    Args:
        context: Context of Ray's autoscaler.
    """
    means, raw = context.aggregated_metrics or {}, context.raw_metrics or {}
    found = []
    for replica in context.running_replicas:
        if any(not raw.get(name, {}).get(replica) for name in _STATS):
            continue
        points = {name: raw[name][replica] for name in _STATS}
        spared = points["spared_tokens"]
        found.append(
            ReplicaLoad(
                str(replica),
                means["waiting_tokens"][replica],
                means["requests"][replica],
                points["capacity"][-1].value,
                spared[-1].value - spared[0].value,
                points["started"][-1].value,
                str(int(points["node"][-1].value)),
            )
        )
    return found
