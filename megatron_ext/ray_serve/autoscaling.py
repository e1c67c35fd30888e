"""Autoscaling policy of Ray Serve by the prompt tokens that wait to be computed; rules in `routing/scaling.py`.

Ray's controller calls the policy, with what replicas return from `record_autoscaling_stats`, and applies the delays and
bounds of the autoscaling configuration to its result. Tried with Ray 2.60.0; nothing of Ray is imported here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from megatron_ext.routing.scaling import ReplicaLoad, is_worth_least, replicas_wanted, stop_order

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

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
