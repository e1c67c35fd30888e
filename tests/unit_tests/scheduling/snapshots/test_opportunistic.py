"""SI-1: states in slots that are free anyway, without a model."""

from __future__ import annotations

import random

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.snapshot_order import MAY_TAKE, Rank
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from tests.unit_tests.scheduling.builders import add, make_limits, request_of, step

ON, OFF = OpportunisticRules(), OpportunisticRules(max_slots=0)


def make_scheduler(slots: int, rules: OpportunisticRules = ON, **limits: object) -> Scheduler:
    """Scheduler with blocks of 64 tokens, whose steps hold every prompt whole."""
    sizes = {"block_size": 64, "total_blocks": 1600, "max_tokens": 80_000, "max_sequence_length": 80_000}
    return Scheduler(make_limits(**{"opportunistic": rules} | sizes | limits), EvictionPolicyName.LRU, b"model", slots)


class Users:
    """Users that send requests one after the other."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.scheduler, self.source, self.count = scheduler, random.Random(seed), 0

    def tokens(self, count: int) -> list[int]:
        return [self.source.randrange(10**6) for _ in range(count)]

    def ask(self, tokens: list[int], **params: object) -> Request:
        request = request_of(self.count, tokens, **{"num_tokens_to_generate": 1} | params)
        self.count += 1
        add(self.scheduler, request)
        while not request.is_ended:
            step(self.scheduler)
        return request

    def sightings(self, shared: int, own: int = 512) -> list[int]:
        """Tokens that the first requests after a shared prefix skip."""
        prefix = self.tokens(shared)
        return [self.ask([*prefix, *self.tokens(own)]).ledger.skipped for _ in range(3)]


@pytest.mark.parametrize(("shared", "slots", "least"), [(2048, 40, 1792), (8192, 64, 7168), (2000, 40, 1744)])
@pytest.mark.parametrize("max_tokens", [80_000, 700])
def test_the_second_sighting_hits(shared: int, slots: int, least: int, max_tokens: int):
    """SI-1, EX-9: the third skips all that blocks can, as ever; cut into chunks or not."""
    first, second, third = Users(make_scheduler(slots, max_tokens=max_tokens)).sightings(shared)
    assert first == 0
    assert second >= least
    assert third == shared // 64 * 64
    off = make_scheduler(slots, OFF, max_tokens=max_tokens)
    assert Users(off).sightings(shared) == [0, 0, shared // 64 * 64]


def others(scheduler: Scheduler) -> set[bytes]:
    """Snapshots that were requested or resumed from."""
    states = scheduler.cache.states
    return {block_hash for block_hash in states._visible if not states.is_provisional(block_hash)}


ASKED = ("snapshots_taken", "snapshots_skipped", "snapshots_replaced", "slots_used", "slots_evicted", "blocks_evicted")


def unique_lives(slots: int, rules: OpportunisticRules, seed: int) -> list[object]:
    """Snapshots kept after each of many prompts; some prompts repeat at once, some later and then read nothing."""
    scheduler = make_scheduler(slots, rules, total_blocks=120, block_size=4, max_tokens=64)
    users, seen, asked = Users(scheduler, seed), [], []
    for _ in range(30):
        kind = users.source.choice(["new", "new", "at once", "later"]) if asked else "new"
        prompt = users.tokens(users.source.randrange(8, 160)) if kind == "new" else asked[-1]
        if kind == "later":
            whole = users.source.choice(asked)
            prompt = whole[: users.source.randrange(8, len(whole) + 1)]
        asked.append(prompt)
        count, scores = users.source.randrange(1, 9), kind == "later"
        skipped = users.ask(prompt, num_tokens_to_generate=count, return_log_probs=scores).ledger.skipped
        use = scheduler.cache.use()
        seen.append((skipped, others(scheduler), [getattr(use, name) for name in ASKED]))
    assert (scheduler.cache.use().provisional_taken > 0) == (rules.max_slots != 0)
    assert scheduler.cache.use().provisional_consumed == 0
    return seen


@pytest.mark.parametrize("slots", [3, 60])
def test_unused_ones_change_nothing_else(slots: int):
    """Prompts that repeat at once resume at their end, where states were requested."""
    rules = OpportunisticRules(spacing=2)
    for seed in range(3):
        assert unique_lives(slots, rules, seed) == unique_lives(slots, OFF, seed)


def test_the_twin_tells_a_guess_that_displaces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MAY_TAKE, Rank.OPPORTUNISTIC, (Rank.OPPORTUNISTIC, Rank.OPTIONAL, Rank.ORDINARY))
    monkeypatch.setattr("megatron_ext.scheduling.snapshots.opportunistic_plan._free_slots", lambda *arguments: 5)
    with pytest.raises(AssertionError):
        test_unused_ones_change_nothing_else(3)


def test_a_limit_of_their_number():
    scheduler = make_scheduler(64, OpportunisticRules(max_slots=5))
    users = Users(scheduler)
    for _ in range(3):
        users.ask(users.tokens(2560))
        assert scheduler.cache.use().provisional_slots <= 5
    assert scheduler.cache.use().provisional_taken == 5


def test_aligned_chunks_leave_the_same_snapshots():
    """Every boundary at which a chunk ends is kept, as an ordinary snapshot; there is nothing beside it."""
    seen = []
    for rules in (OpportunisticRules(), OFF):
        scheduler = make_scheduler(64, rules, aligned_chunks=True, max_tokens=300)
        skipped = Users(scheduler).sightings(2048)
        seen.append((skipped, scheduler.cache.use()))
    assert seen[0] == seen[1]
    assert seen[0][1].provisional_taken == 0


def test_a_checkpoint_is_where_others_resume():
    """Positions are rounded down to a block; tokens after the prompt's last boundary are useless."""
    scheduler = make_scheduler(40)
    users = Users(scheduler)
    prefix = users.tokens(1000)  # 15 blocks and a part
    users.ask([*prefix, *users.tokens(600)], cache_checkpoint=(1000, 1599))
    assert users.ask([*prefix, *users.tokens(600)]).ledger.skipped == 960
    plain = Users(make_scheduler(40))
    plain.ask([*prefix, *plain.tokens(600)])
    assert plain.ask([*prefix, *plain.tokens(600)]).ledger.skipped == 768


def test_of_more_boundaries_than_slots_the_last_are_kept():
    """The slots that the rest was to have are taken in the meantime: a request skips the more the later a state is."""
    scheduler = make_scheduler(40, max_tokens=1300)
    request = request_of(0, range(2560))
    add(scheduler, request)
    step(scheduler)
    passed = [position for position in request.snapshot_plan.opportunistic if 1300 < position <= 2560]
    assert len(passed) > 3
    states = scheduler.cache.states
    while states.free_count > 4:  # what is computed to the end wants one itself
        states.reserve(b"others%d" % states.free_count)
    plan = scheduler.schedule()
    taken = [one.position for one in plan.snapshots if one.rank is Rank.OPPORTUNISTIC]
    room = 4 - sum(one.rank is not Rank.OPPORTUNISTIC for one in plan.snapshots)
    assert 0 < room < len(passed)
    assert taken == passed[-room:]
