"""The router in front of a simulated fleet (RP-7), beside other rules on the same traffic: tables of docs/routing.md.

Times of requests are simulated and do not depend on the machine; decisions are measured in CPU time of one thread.
"""

from __future__ import annotations

import sys

from benchmarks.cases import Figure, Run, case
from benchmarks.routing.balancers import BALANCERS, Balancer, Ours
from benchmarks.routing.world import Outcome, Scale, World


@case("routing", quick={"replicas": (4,), "requests": 200})
def fleet(
    run: Run,
    replicas: tuple = (16, 256, 4096),
    requests: int = 100_000,
    rules: tuple = tuple(BALANCERS),
    alpha: float = 0.5,
    offered: float = 2.0,
) -> None:
    """Simulated fleets: skipped tokens, queueing, first tokens, balance and decisions a second, by rule.

    `offered` is the rate of prompt tokens over what could be computed uncached.
    """
    for count in replicas:
        for rule in rules:
            run.row(f"{rule}, {count:,} replicas", measure(rule, Scale(count, requests, offered=offered), alpha))


def measure(rule: str, scale: Scale, alpha: float = 0.5) -> dict[str, Figure]:
    """Return the columns of one simulation."""
    kind = BALANCERS[rule]
    balancer: Balancer = kind(scale.replicas, alpha) if kind is Ours else kind(scale.replicas)
    return figures(World(scale, balancer).run(), balancer)


def figures(outcome: Outcome, balancer: Balancer) -> dict[str, Figure]:
    """Return the columns of an outcome."""
    found: dict[str, Figure] = {"requests": len(outcome.firsts), "skipped, %": 100 * outcome.skipped}
    for name, values in (("queueing", sorted(outcome.waits)), ("first token", sorted(outcome.firsts))):
        for percent in (50, 99):
            found[f"{name} p{percent}, s"] = values[min(len(values) - 1, len(values) * percent // 100)]
    return found | {
        "most computed over mean": outcome.imbalance,
        "retried": outcome.retried,
        "decisions/s": len(outcome.firsts) / outcome.choosing,
        "requests/s": len(outcome.firsts) / outcome.all_told,
        "memory, MB": footprint(balancer) / 2**20,
    }


def footprint(balancer: Balancer) -> int:
    """Return the bytes of everything that a balancer holds."""
    seen, left, total = {id(balancer.random)}, [balancer], 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type) or callable(one):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            left += one
        elif hasattr(one, "__dict__"):
            left.append(vars(one))
    return total
