"""Megatron's routing policies against a restatement of its rules, and against its own code where that is unpacked.

The restatement never forgets a block; so it holds for histories in which nothing is evicted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing import index
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Decision, Router

SIZE = 4
SLOTS = 8
POLICIES = ("longest_prefix", "first_prefix_block", "load_balanced")


@dataclass
class Rule:
    """Megatron's coordinator in plain words.

    Attributes:
        policy: Name of the policy.
        alpha: Weight of affinity.
        pending: Requests in flight, by rank.
        table: Prefix -> rank -> number of the last request with this prefix that was sent there.
    """

    policy: str
    alpha: float
    pending: list[int]
    table: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)
    sent: int = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """Complete blocks of a prompt, each with all before it."""
        found = [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]
        return found[:1] if self.policy == "first_prefix_block" else found

    def choose(self, tokens: list[int]) -> int:
        ranks = range(len(self.pending))
        prefixes = self.prefixes(tokens)
        if self.policy == "load_balanced" or not prefixes:
            return min(ranks, key=lambda rank: (self.pending[rank], rank))
        known = [depth for depth, prefix in enumerate(prefixes) if prefix in self.table]
        holders = self.table[prefixes[known[-1]]] if known else {}

        def order(rank: int) -> tuple[float, int, int]:
            match = (known[-1] + 1) / len(prefixes) if rank in holders else 0.0
            free = max(0, SLOTS - self.pending[rank]) / SLOTS
            return -(self.alpha * match + (1 - self.alpha) * free), -holders.get(rank, 0), rank

        return min(ranks, key=order)

    def send(self, rank: int, tokens: list[int]) -> None:
        self.pending[rank] += 1
        self.sent += 1
        for prefix in self.prefixes(tokens):
            self.table.setdefault(prefix, {})[rank] = self.sent


def made(policy: str, alpha: float, replicas: int) -> Router:
    router = Router(RoutingConfig(policy, alpha))
    for i in range(replicas):
        router.join(str(i), SIZE, slots=SLOTS)
    return router


def history(seed: int, policy: str):
    """Yield (prompt, choice of the router, choice of the rule) of a random history with shared prefixes."""
    chance = random.Random(seed)
    replicas, alpha = chance.randint(1, 5), chance.choice([0.0, 0.25, 0.5, 0.9, 1.0])
    router, rule = made(policy, alpha, replicas), Rule(policy, alpha, [0] * replicas)
    running: dict[int, int] = {}
    for request in range(120):
        for one in [one for one in running if chance.random() < 0.15]:
            router.ended(one)
            rule.pending[running.pop(one)] -= 1
        tokens = [chance.randint(0, 1) for _ in range(chance.randint(1, 5)) for _ in range(SIZE)]
        tokens = tokens[: chance.randint(1, len(tokens))]
        prompt = Prompt(tokens)
        decision = router.route(prompt)
        expected = rule.choose(tokens)
        yield tokens, int(decision.replica), expected
        router.began(request, decision, prompt)
        rule.send(expected, tokens)
        running[request] = expected
        blocks = [hash((expected, *tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]
        if blocks:  # the replica caches all of them, and evicts nothing
            router.members[decision.replica].stored(blocks, None, tokens[: len(blocks) * SIZE])
        router.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_choices_equal_megatrons(policy):
    """RP-2: request by request over random histories of up to five replicas, at any alpha, ties included."""
    chosen = set()
    for seed in range(40):
        for tokens, choice, expected in history(seed, policy):
            assert choice == expected, (seed, tokens)
            chosen.add(choice)
    assert chosen == {0, 1, 2, 3, 4}


def hold(router: Router, replica: str, tokens: range) -> list[str]:
    names = [f"{replica}.{i}" for i in range(len(tokens) // SIZE)]
    router.members[replica].stored(names, None, tokens)
    return names


def send(router: Router, replica: str, request: str, tokens: range) -> None:
    router.began(request, Decision(replica, 0), Prompt(tokens))


def test_what_was_evicted_draws_nothing():
    """RP-2: upstream's table keeps every block that was sent; here a block counts while it is held or computed."""
    router = made("longest_prefix", 0.9, 2)
    send(router, "1", "one", range(16))
    assert router.route(Prompt(range(16))).replica == "1", "it is about to be cached there"
    names = hold(router, "1", range(16))
    router.ended("one")
    assert router.route(Prompt(range(16))).replica == "1"
    router.members["1"].removed(names[::-1])
    assert router.route(Prompt(range(16))) == Decision("0", 0)


@pytest.mark.parametrize("policy", ["longest_prefix", "first_prefix_block"])
def test_ties_go_to_the_latest_assignment(policy):
    """RP-2: of two replicas with the block and equal load, the one that was last sent it."""
    router = made(policy, 0.5, 3)
    for replica in "012":
        hold(router, replica, range(16))
    for request, replica in enumerate("121"):
        send(router, replica, request, range(16))
        router.ended(request)
    assert router.route(Prompt(range(16))).replica == "1"
    send(router, "2", "last", range(16))
    router.ended("last")
    assert router.route(Prompt(range(16))).replica == "2"


def test_resumable_replicas_match_up_to_a_snapshot():
    """RP-2: with recurrent layers blocks beyond the last snapshot are computed again, so they are no match."""
    router = Router(RoutingConfig("longest_prefix", 1.0))
    for name in "01":
        router.join(name, SIZE, has_states=True, slots=SLOTS)
    deep, short = hold(router, "0", range(16)), hold(router, "1", range(8))
    assert router.route(Prompt(range(17))).skipped == 0
    router.members["1"].state_stored(short[1:])
    assert router.route(Prompt(range(17))) == Decision("1", 8)
    router.members["0"].state_stored(deep[3:])
    assert router.route(Prompt(range(17))) == Decision("0", 16)


def test_requests_of_other_routers_count():
    """RP-2: what a replica has from other routers takes as many of its slots."""
    router = made("load_balanced", 0.5, 2)
    router.note_others("0", 2, 10, 0)
    send(router, "1", "one", range(4))
    assert router.route(Prompt(range(4))).replica == "1"
    send(router, "1", "two", range(4))
    assert router.route(Prompt(range(4))).replica == "0"
    router.note_others("0", 3, 10, 0)
    assert router.route(Prompt(range(4))).replica == "1"


def test_the_table_of_assignments_is_bounded(monkeypatch):
    """RP-3: entries of blocks that are gone are dropped, those of blocks that are held stay."""
    monkeypatch.setattr(index, "_FEW", 32)
    router = made("longest_prefix", 0.5, 1)
    hold(router, "0", range(16))
    send(router, "0", "held", range(16))
    router.ended("held")
    for i in range(1, 50):
        send(router, "0", i, range(1000 * i, 1000 * i + 16))
        router.ended(i)
    table = router.members["0"].assignments
    assert len(table) <= 64
    assert table.keys() >= set(Prompt(range(16)).keys(SIZE))
