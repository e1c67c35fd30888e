"""Routing decisions and the router's inputs; test_router_machine.py tests random sequences of a fleet."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Decision, Router

SIZE = 4


def fleet(policy: str = "least_computed", alpha: float = 0.5, count: int = 3, **options: object) -> Router:
    """Replicas 0, 1, ... with blocks of four tokens."""
    router = Router(RoutingConfig(policy, alpha))
    for i in range(count):
        router.join(str(i), SIZE, **options)
    return router


def hold(router: Router, replica: str, length: int, salt: str | None = None) -> list[str]:
    """A replica holds the first `length` of the tokens 0, 1, ...; what it calls the blocks."""
    names = [f"{replica}.{salt}.{i}" for i in range(length // SIZE)]
    router.members[replica].stored(names, None, range(length), salt and [[salt], *[None] * (len(names) - 1)])
    return names


def busy(router: Router, replica: str, tokens: int) -> None:
    """Give a replica so many unshared tokens to compute."""
    prompt = Prompt([10**6 + i for i in range(tokens)])
    router.began(object(), Decision(replica, 0), prompt)


def test_the_load_by_other_routers_replaces_what_was_said_before():
    """RP-2: of each of their requests the recent average is expected, and no more than their limit."""
    router = fleet(count=1)
    for requests, prompt_tokens, output_tokens, load in ((2, 100, 8, 108), (2, 100, 50_000, 612), (0, 0, 0, 0)):
        router.note_others("0", requests, prompt_tokens, output_tokens)
        assert router.load("0") == load


def test_round_robin():
    """RP-2: prefixes decide nothing, and what will be skipped is counted all the same."""
    router = fleet("round_robin")
    hold(router, "1", 40)
    decisions = [router.route(Prompt(range(40))) for _ in range(6)]
    assert [(one.replica, one.skipped) for one in decisions[:3]] == [("0", 0), ("1", 39), ("2", 0)]
    assert Counter(one.replica for one in decisions) == dict.fromkeys("012", 2)


def test_a_prompt_that_reads_no_cache_goes_where_the_least_is_queued():
    """RP-2: what is cached draws no prompt whose log-probs are computed; the least loaded replica gets it."""
    router = fleet(count=2, has_states=True)
    names = hold(router, "0", 40)
    router.members["0"].state_stored(names)
    busy(router, "0", 5)
    assert router.route(Prompt(range(41))).replica == "0"
    prompt = Prompt(range(41), is_cached=False)
    decision = router.route(prompt)
    assert decision == Decision("1", 0)
    router.began("one", decision, prompt)
    assert router.route(Prompt(range(41)), exclude=["0"]).skipped == 0, "it leaves nothing for others"
    router.prefilled("one")
    router.ended("one")
    router.check()


def test_a_request_that_will_cache_nothing_draws_no_others():
    """RP-3: after a reset of the cache a running request publishes nothing; it still counts as load."""
    router = fleet(count=1)
    prompt = Prompt(range(16))
    router.began("one", router.route(prompt), prompt)
    router.unclaim("one")
    router.check()
    assert router.route(prompt).skipped == 0
    assert router.load("0") == 16
    router.ended("one")
    router.check()


def test_a_warming_replica_has_its_share_from_the_first_request_on():
    """TE-6: a new replica counts as having been given as much as the replica that was given the least."""
    router = fleet(count=2)
    busy(router, "0", 1000)
    router.ended(next(iter(router._in_flight)))
    router.join("new", SIZE)
    for i in range(3):
        prompt = Prompt([10 * i])
        decision = router.route(prompt, exclude=["0"])
        router.began(i, decision, prompt)
        router.ended(i)
        assert decision.replica == ("1", "new", "1")[i]


@pytest.mark.parametrize("count", [3, 40])
def test_of_many_replicas_the_least_loaded_one(count):
    """TE-6: the result is the same by comparing all replicas and by their sorted order."""
    router = fleet(count=count)
    for i in range(count):
        busy(router, str(i), 10 + (7 * i) % count)
    prompt = Prompt(range(8))
    least = [str(i) for i in sorted(range(count), key=lambda i: (7 * i) % count)]
    assert router.route(prompt).replica == least[0]
    assert router.route(prompt, exclude=least[:2]).replica == least[2]


def test_a_match_of_half_the_prompt_is_none_of_many_conversations():
    """TE-6: the match draws the prompt although the replica holds more than others; one token less does not."""
    router = fleet(count=2)
    hold(router, "1", 16)
    half, less = ([*range(16), *range(100, 100 + more)] for more in (16, 17))
    assert router.route(Prompt(half)).replica == "1"
    assert router.route(Prompt(less)).replica == "0"


def test_a_match_of_less_draws_a_prompt_to_a_replica_with_much_memory():
    """TE-6: what the replica holds more than others costs by its share of the memory, not of what it holds."""
    router = fleet(count=2, blocks=1000)
    hold(router, "1", 16)
    assert router.route(Prompt([*range(16), *range(100, 117)])) == Decision("1", 16)


def test_expected_length_follows_other_requests():
    """RP-2: the expected length follows other requests: a limit of 10,000 tokens is not a load of 10,000 tokens."""
    router = fleet(count=1)
    for i in range(500):
        prompt = Prompt([i])
        router.began(i, router.route(prompt), prompt, 10_000)
        router.ended(i, generated=40)
    router.began("next", router.route(prompt), prompt, 10_000)
    assert 40 <= router.load("0") <= 45
    router.generated("next", 30)
    assert router.load("0") <= 15
    router.ended("next")
    router.check()


def test_events_that_make_no_sense():
    """RP-3: a block with an unknown parent is left out; a run of the wrong length is the caller's mistake."""
    router = fleet(count=1)
    router.members["0"].stored([5], 4, range(4))
    router.members["0"].state_stored([5])
    router.members["0"].removed([5])
    names = hold(router, "0", 8)
    router.members["0"].stored(names, None, range(8))  # told twice
    router.members["0"].stored(names[:1], None, range(4, 8))  # another block under a known name
    router.check()
    assert len(router.members["0"].blocks) == 2
    with pytest.raises(ValueError, match="1 blocks of 4 tokens come with 3"):
        router.members["0"].stored([9], None, range(3))
    with pytest.raises(ValueError, match="token ids must be"):
        router.members["0"].stored([9], None, [-1, 0, 0, 0])


def test_mistakes_of_the_caller():
    router = fleet(count=1)
    prompt = Prompt([1])
    with pytest.raises(ValueError, match="is already a member"):
        router.join("0", SIZE)
    with pytest.raises(ValueError, match="must be positive"):
        router.join("1", 0)
    with pytest.raises(ValueError, match="at least one token"):
        Prompt([])
    with pytest.raises(ValueError, match="token ids must be"):
        Prompt([2**32])
    router.began("one", router.route(prompt), prompt)
    with pytest.raises(ValueError, match="is in flight to '0'"):
        router.began("one", router.route(prompt), prompt)
    with pytest.raises(KeyError):
        router.leave("unknown")


def test_new_conversations_with_one_beginning_do_not_crowd_one_replica():
    """A shared beginning attracts requests while the replica holds no more than others; their own tokens always do."""
    router = Router()
    homes: dict[int, str] = {}
    for name in ("a", "b"):
        router.join(name, SIZE)
    beginning = list(range(3 * SIZE))
    for chat in range(40):
        first = Prompt([*beginning, *range(1000 * chat, 1000 * chat + 5 * SIZE)])
        decision = router.route(first)
        homes[chat] = decision.replica
        router.began(chat, decision, first)
        router.ended(chat)
        hashes = [("block", decision.replica, key) for key in first.keys(SIZE)]
        router.members[decision.replica].stored(hashes, None, [*beginning, *range(1000 * chat, 1000 * chat + 5 * SIZE)])
    held = [one.held for one in router.members.values()]
    assert max(held) < 1.25 * min(held)
    for chat, home in homes.items():
        second = Prompt([*beginning, *range(1000 * chat, 1000 * chat + 6 * SIZE)])
        assert router.route(second).replica == home
    router.join("new", SIZE)
    assert router.route(second).replica == home, "a conversation does not move to where memory is free"
