"""Where requests go, and what the router is told for that."""

from __future__ import annotations

from megatron_ext.routing.router import Reason, Router

SIZE = 4


def test_events_and_flights_make_affinity():
    """A run that one replica holds and another is about to hold draws the prompt; the last token is never skipped."""
    router = Router()
    router.join("idle", SIZE)
    router.join("holder", SIZE)
    prompt = router.prompt(range(16))
    assert router.route(prompt).reason is Reason.NOTHING_KNOWN
    assert router.stored("holder", [11, 12], None, range(8))
    assert router.stored("holder", [13, 14], 12, range(8, 16))
    decision = router.route(prompt)
    assert (decision.replica, decision.skipped, decision.reason) == ("holder", 15, Reason.PREFIX)
    router.began("one", decision, prompt)
    router.cleared("holder")
    assert router.route(prompt).skipped == 15, "it is in flight there"
    router.ended("one")
    router.check()
    assert router.route(prompt).skipped == 0


def test_new_conversations_with_one_beginning_do_not_crowd_one_replica():
    """What they share draws them as long as the replica holds no more than others; what is their own always does."""
    router = Router()
    homes: dict[int, str] = {}
    for name in ("a", "b"):
        router.join(name, SIZE)
    beginning = list(range(3 * SIZE))
    for chat in range(40):
        first = router.prompt([*beginning, *range(1000 * chat, 1000 * chat + 5 * SIZE)])
        decision = router.route(first)
        homes[chat] = decision.replica
        router.began(chat, decision, first)
        router.ended(chat)
        hashes = [("block", decision.replica, key) for key in first.keys(SIZE)]
        router.stored(decision.replica, hashes, None, [*beginning, *range(1000 * chat, 1000 * chat + 5 * SIZE)])
    held = [view.blocks for view in router.replicas()]
    assert max(held) < 1.25 * min(held)
    for chat, home in homes.items():
        second = router.prompt([*beginning, *range(1000 * chat, 1000 * chat + 6 * SIZE)])
        assert router.route(second).replica == home
    router.join("new", SIZE)
    assert router.route(second).replica == home, "a conversation does not move to where memory is free"
