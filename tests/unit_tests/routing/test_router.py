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
