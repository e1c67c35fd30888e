"""Balancers: the router that serves, and the rules of other projects, written from their descriptions.

Dynamo's cost rule (NVIDIA's guide to its KV router): the lowest of `overlap weight * prefill blocks + decode blocks`,
where prefill blocks are the replica's blocks yet to be computed, this prompt's included, less the blocks reported as
cached, and decode blocks are its blocks in use, this prompt's included, each once; equal replicas at random; weight 1,
temperature 0.

SGLang's cache-aware rule (the guides of its gateway): if more than 64 requests and a factor of 1.5 lie between the most
and the least loaded replica, the least loaded one; else one whose past requests share the longest prefix with this one,
if that is more than 0.3 of it; else the one with the smallest record of past requests. A record has the prompts sent to
a replica, cached or not, of at most 2**24 characters, which are not reached here.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import numpy as np

from benchmarks.routing.traffic import MAX_ANSWER
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.choosing import numbers
from megatron_ext.routing.index import Holders
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Decision, Router


class Balancer:
    """Balancer that chooses a replica; it gets all events, and each rule uses only the facts that its router has."""

    def __init__(self, replicas: int) -> None:
        self.random = random.Random(0)
        self.up = np.ones(replicas, dtype=bool)
        self.requests = np.zeros(replicas)
        self._where: dict[Hashable, int] = {}

    def choose(self, prompt: Prompt) -> int:
        """Return the replica that shall run the prompt."""
        raise NotImplementedError

    def began(self, request: Hashable, replica: int, prompt: Prompt) -> None:
        """Note that the request has been sent to the replica."""
        self._where[request] = replica
        self.requests[replica] += 1

    def prefilled(self, request: Hashable) -> None:
        """Note that the request's first token has arrived."""

    def ended(self, request: Hashable, generated: int) -> None:
        """Note that the request has ended."""
        self.requests[self._where.pop(request)] -= 1

    def stored(self, replica: int, keys: Sequence[int], parent: int | None, ids: Sequence[int], salt: str) -> None:
        """An event."""

    def removed(self, replica: int, keys: Sequence[int]) -> None:
        """An event."""

    def left(self, replica: int, lost: Sequence[Hashable]) -> None:
        """Note that the replica died with these requests."""
        for request in lost:
            self.ended(request, 0)
        self.up[replica] = False

    def joined(self, replica: int) -> None:
        """Note that the replica is back, with an empty cache."""
        self.up[replica] = True

    def _least(self, costs: np.ndarray) -> int:
        """Return the cheapest of the replicas that are up; ties are broken at random."""
        costs = np.where(self.up, costs, np.inf)
        return self.random.choice(np.flatnonzero(costs == costs.min()).tolist())


class RoundRobin(Balancer):
    """Send requests to the replicas in turn."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._last = -1

    def choose(self, prompt: Prompt) -> int:
        """Return the next replica that is up."""
        while True:
            self._last = (self._last + 1) % len(self.up)
            if self.up[self._last]:
                return self._last


class Random(Balancer):
    """Any."""

    def choose(self, prompt: Prompt) -> int:
        """Return a random replica that is up."""
        return self._least(np.zeros(len(self.up)))


class LeastLoaded(Balancer):
    """Fewest requests."""

    def choose(self, prompt: Prompt) -> int:
        """Return the replica with the fewest requests."""
        return self._least(self.requests)


class CacheAware(Balancer):
    """SGLang's rule."""

    def __init__(self, replicas: int, threshold: float = 0.3, absolute: int = 64, relative: float = 1.5) -> None:
        super().__init__(replicas)
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._sent = Holders()
        self._records = np.zeros(replicas)

    def choose(self, prompt: Prompt) -> int:
        """Return a replica by SGLang's cache-aware rule (see above)."""
        loads = self.requests[self.up]
        if loads.max() - loads.min() > self._absolute and loads.max() > self._relative * loads.min():
            return self._least(self.requests)
        keys, depth = prompt.keys(1), 0
        while depth < len(keys) and keys[depth] in self._sent.bits:
            depth += 1
        if depth > self._threshold * len(keys):
            return self.random.choice(numbers(self._sent.bits[keys[depth - 1]]))
        return self._least(self._records)

    def began(self, request: Hashable, replica: int, prompt: Prompt) -> None:
        """Add the prompt to the replica's record."""
        super().began(request, replica, prompt)
        bit = 1 << replica
        new = [key for key in prompt.keys(1) if not self._sent.bits.get(key, 0) & bit]
        self._sent.add(bit, new)
        self._records[replica] += len(new)

    def left(self, replica: int, lost: Sequence[Hashable]) -> None:
        """Empty the record of the dead replica."""
        super().left(replica, lost)
        bit = 1 << replica
        self._sent.discard(bit, [key for key, there in self._sent.bits.items() if there & bit])
        self._records[replica] = 0


class Ours(Balancer):
    """The router that serves."""

    def __init__(self, replicas: int, alpha: float = 0.5, policy: str = "least_computed") -> None:
        super().__init__(replicas)
        self.router = Router(RoutingConfig(policy=policy, alpha=alpha))
        self._names = [str(replica) for replica in range(replicas)]
        for name in self._names:
            self.router.join(name, 1)
        self._decision: Decision | None = None

    def choose(self, prompt: Prompt) -> int:
        """Return the replica that the router chooses."""
        self._decision = self.router.route(prompt)
        return int(self._decision.replica)

    def began(self, request: Hashable, replica: int, prompt: Prompt) -> None:
        """Report the sent request to the router."""
        self.router.began(request, self._decision, prompt, MAX_ANSWER)

    def prefilled(self, request: Hashable) -> None:
        """Report the first token to the router."""
        self.router.prefilled(request)

    def ended(self, request: Hashable, generated: int) -> None:
        """Report the end of the request to the router."""
        self.router.ended(request, generated)

    def stored(self, replica: int, keys: Sequence[int], parent: int | None, ids: Sequence[int], salt: str) -> None:
        """Report stored blocks to the router."""
        extra = [[salt], *[None] * (len(keys) - 1)] if parent is None else None
        self.router.members[self._names[replica]].stored(keys, parent, ids, extra)

    def removed(self, replica: int, keys: Sequence[int]) -> None:
        """Report removed blocks to the router."""
        self.router.members[self._names[replica]].removed(keys)

    def left(self, replica: int, lost: Sequence[Hashable]) -> None:
        """Report the dead replica to the router; the router must know exactly the lost requests."""
        assert set(self.router.leave(self._names[replica])) == set(lost)

    def joined(self, replica: int) -> None:
        """Report the new replica to the router."""
        self.router.join(self._names[replica], 1)


def _depths(holders: Holders, prompt: Prompt) -> dict[int, int]:
    """Blocks of a prompt that each replica has from its start, without replicas that have none."""
    found, there = {}, -1
    for depth, key in enumerate(prompt.keys(1)):
        now = there & holders.bits.get(key, 0)
        if depth:
            found.update(dict.fromkeys(numbers(there ^ now), depth))
        if not now:
            return found
        there = now
    return found | dict.fromkeys(numbers(there), len(prompt))


class CostRule(Balancer):
    """Dynamo's rule; events are kept as they come."""

    def __init__(self, replicas: int, weight: float = 1.0) -> None:
        super().__init__(replicas)
        self._weight = weight
        self._cached = Holders()
        self._held: list[set[int]] = [set() for _ in range(replicas)]
        self._prefill = np.zeros(replicas)
        self._decode = np.zeros(replicas)
        self._active = Holders()
        self._flights: dict[Hashable, Sequence[int]] = {}
        self._left: dict[Hashable, int] = {}  # blocks yet to be computed
        self._overlaps: dict[int, int] = {}  # of the last prompt

    def choose(self, prompt: Prompt) -> int:
        """The lowest cost."""
        blocks = len(prompt)
        costs = self._weight * (self._prefill + blocks) + self._decode + blocks
        self._overlaps = _depths(self._cached, prompt)
        for replica, overlap in self._overlaps.items():
            costs[replica] -= self._weight * overlap
        for replica, overlap in _depths(self._active, prompt).items():
            costs[replica] -= overlap
        return self._least(costs)

    def began(self, request: Hashable, replica: int, prompt: Prompt) -> None:
        """Count the request's prefill and decode blocks for the replica."""
        super().began(request, replica, prompt)
        keys, bit = prompt.keys(1), 1 << replica
        self._flights[request] = keys
        self._left[request] = len(keys) - self._overlaps.get(replica, 0)
        self._prefill[replica] += self._left[request]
        self._decode[replica] += sum(not self._active.bits.get(key, 0) & bit for key in keys)
        self._active.add(bit, keys)

    def prefilled(self, request: Hashable) -> None:
        """Subtract the blocks that no longer have to be prefilled."""
        self._prefill[self._where[request]] -= self._left[request]
        self._left[request] = 0

    def ended(self, request: Hashable, generated: int) -> None:
        """Subtract the blocks of the ended request."""
        self.prefilled(request)
        del self._left[request]
        keys, replica = self._flights.pop(request), self._where[request]
        self._active.discard(1 << replica, keys)
        self._decode[replica] -= sum(not self._active.bits.get(key, 0) & 1 << replica for key in keys)
        super().ended(request, generated)

    def stored(self, replica: int, keys: Sequence[int], parent: int | None, ids: Sequence[int], salt: str) -> None:
        """Record blocks that the replica has cached."""
        self._cached.add(1 << replica, keys)
        self._held[replica].update(keys)

    def removed(self, replica: int, keys: Sequence[int]) -> None:
        """Forget blocks that the replica has removed."""
        self._cached.discard(1 << replica, keys)
        self._held[replica].difference_update(keys)

    def left(self, replica: int, lost: Sequence[Hashable]) -> None:
        """Forget the dead replica's cached blocks."""
        super().left(replica, lost)
        self.removed(replica, list(self._held[replica]))


BALANCERS = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "cache_aware": CacheAware,
    "cost_rule": CostRule,
    "least_computed": Ours,
}
