"""Hints of requests (SI-8): a later request hits that misses without them; tenants lose what they lose without any."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.cache_hints import CacheHints
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.hints import MAX_SESSIONS, Hints
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from megatron_ext.scheduling.submission import Submission
from tests.unit_tests.scheduling.builders import add, make_limits, step

POLICIES = pytest.mark.parametrize("policy", [EvictionPolicyName.LRU, EvictionPolicyName.FLOPS])


class Clients:
    """Clients whose requests come a second after each other, each when the one before has ended.

    A first request has given a hint, unless the cache `is_new`.
    """

    def __init__(
        self,
        blocks: int = 64,
        slots: int | None = None,
        policy: EvictionPolicyName = EvictionPolicyName.LRU,
        *,
        is_new: bool = False,
        slabs: SlabLayout | None = None,
    ) -> None:
        limits = make_limits(
            total_blocks=blocks if slabs is None else slabs.blocks,
            max_tokens=64,
            opportunistic=OpportunisticRules(max_slots=0),
            slabs=slabs,
        )
        self.scheduler = Scheduler(limits, policy, b"model", slots)
        self.count = 0
        if not is_new:
            self.ask([1], session="first")

    def ask(self, tokens: Sequence[int], salt: str | None = None, at: float | None = None, **hints: object) -> int:
        """Return the prompt tokens that a request skips."""
        params = RequestParams(
            num_tokens_to_generate=1, cache_salt=salt, cache_hints=CacheHints(**hints) if hints else None
        )
        now = float(self.count) if at is None else at
        request = Request(Submission(self.count, tuple(tokens), params, self.count, 0, submitted_at=now))
        self.count += 1
        add(self.scheduler, request)
        while not request.is_ended:
            step(self.scheduler)
        return request.skipped_prefill_tokens


def prompt(name: int, length: int = 16) -> list[int]:
    """A prompt with a first token of its own."""
    return [1000 * name + i for i in range(length)]


OLD, SUBJECT, NEW = prompt(1), prompt(2), prompt(3)
WHOLE = 15  # tokens that a prompt of 16 skips if all its blocks are cached: the last one is computed


def skipped_after(clients: Clients, first: dict[str, object], then: dict[str, object]) -> tuple[int, int]:
    """Ask OLD, SUBJECT with hints `first`, NEW with hints `then`; return what OLD and SUBJECT skip afterwards.

    There is room for ten blocks: two of those of OLD or SUBJECT go for NEW.
    """
    clients.ask(OLD)
    clients.ask(SUBJECT, **first)
    clients.ask(NEW, **then)
    cached = [len(clients.scheduler.cache.match(hashes_of(clients, tokens))) for tokens in (OLD, SUBJECT)]
    return cached[0], cached[1]


def hashes_of(clients: Clients, tokens: Sequence[int]) -> Sequence[BlockHash]:
    """Block hashes of a prompt without a salt."""
    probe = Request(Submission(10**6, tuple(tokens), RequestParams(), 10**6, 0))
    clients.scheduler._start_chain(probe)
    return probe.block_hashes


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"session": "a", "ends_session": True}, {}),
        ({"session": "a"}, {"ended_sessions": ["a"]}),
        ({"session": "a"}, {"session": "b", "replaces": "a"}),
        ({"session": "a", "parent_session": "p"}, {"ended_sessions": ["p"]}),
    ],
)
def test_blocks_of_an_ended_session_go_first(first: dict, then: dict):
    """SI-8: the least recently used blocks go without the hint."""
    assert skipped_after(Clients(10), {"session": "a"}, {}) == (2, 4)
    if "replaces" in then:  # known when NEW has its blocks: the next ones are those of the ended session
        clients = Clients(10)
        assert skipped_after(clients, first, then) == (2, 4)
        clients.ask(prompt(4, 8))
        assert len(clients.scheduler.cache.match(hashes_of(clients, OLD))) == 2
        assert len(clients.scheduler.cache.match(hashes_of(clients, SUBJECT))) == 2
    else:
        assert skipped_after(Clients(10), first, then) == (4, 2)


@POLICIES
def test_the_hit_that_follows(policy: EvictionPolicyName):
    for ends, expected in ((False, 8), (True, WHOLE)):
        clients = Clients(10, policy=policy)
        clients.ask(OLD)
        clients.ask(SUBJECT, session="a", ends_session=ends)
        clients.ask(NEW)
        assert clients.ask(OLD) == expected


@pytest.mark.parametrize("names", [{"session": "b"}, {"ended_sessions": ["b"]}])
def test_sessions_that_have_not_ended_keep_their_place(names: dict):
    assert skipped_after(Clients(10), {"session": "a"}, names) == (2, 4)


@pytest.mark.parametrize(("other", "new"), [([*SUBJECT[:8], *prompt(5, 8)], 20), (SUBJECT[:9], 28)])
def test_what_another_request_uses_is_not_spent(other: list[int], new: int):
    """The first two blocks are those of another request as well, so only two go first."""
    clients = Clients(12)
    clients.ask(OLD)
    clients.ask(SUBJECT, session="a")
    clients.ask(other)
    clients.ask([77], ended_sessions=["a"])
    clients.ask(prompt(6, new))
    cached = [len(clients.scheduler.cache.match(hashes_of(clients, tokens))) for tokens in (SUBJECT, OLD)]
    assert cached == [2, 3], "two spent blocks, then the oldest"


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ([{}, {}], 8),  # without hints the oldest blocks go
        ([{"session": "a"}, {"session": "a"}], 8),  # such as a cache key of several conversations
        ([{"session": "a", "turn": 1}, {"session": "a", "turn": 1}], 8),  # a retry
        ([{"session": "a", "turn": 1}, {"session": "a", "turn": 2}], WHOLE),
        ([{"session": "a"}, {"session": "a", "replaces": "a"}], WHOLE),
        ([{"session": "a"}, {"session": "b", "replaces": "a"}], WHOLE),
    ],
)
def test_a_replaced_prompt_goes_first(hints: list[dict], expected: int):
    """SI-8, compaction: two prompts have eight tokens in common; the other blocks of the first are used no more."""
    clients = Clients(12)
    clients.ask(OLD)
    clients.ask(SUBJECT, **hints[0])
    clients.ask([*SUBJECT[:8], *prompt(5, 8)], **hints[1])
    clients.ask(NEW)
    assert clients.ask(OLD) == expected


@POLICIES
def test_a_pausing_session_is_kept_until_its_time_is_over(policy: EvictionPolicyName):
    for pause, at, expected in ((None, 50.0, 8), (100.0, 50.0, WHOLE), (100.0, 500.0, 8)):
        clients = Clients(10, policy=policy)
        clients.ask(SUBJECT, session="a", pause_seconds=pause)
        clients.ask(OLD, at=10.0)
        clients.ask(NEW, at=at)
        assert clients.ask(SUBJECT, at=at) == expected


def test_if_all_pause_none_does():
    clients = Clients(10)
    clients.ask(SUBJECT, session="a", pause_seconds=1000.0)
    clients.ask(OLD, session="b", pause_seconds=1000.0)
    clients.ask(NEW)
    assert clients.ask(OLD) + clients.ask(SUBJECT) < 2 * WHOLE


@POLICIES
def test_a_newer_snapshot_supersedes_earlier_ones_of_its_session(policy: EvictionPolicyName):
    """SI-8, two slots: without hints the oldest snapshot goes, with them the one that the session resumes from."""
    for hints, expected in (([{}, {}], 0), ([{"session": "a"}, {"session": "a"}], 16)):
        clients = Clients(slots=2, policy=policy)
        clients.ask(prompt(1, 17))
        clients.ask(prompt(2, 17), **hints[0])
        clients.ask(prompt(2, 33), **hints[1])
        assert clients.ask(prompt(1, 17)) == expected


def test_of_superseded_snapshots_the_closest_to_the_one_before_goes_first():
    """Snapshots at 16, 24 and 40 tokens: the second saves 8 tokens more than the first, which saves 16."""
    for turns, expected in (([None] * 3, 24), ([1, 2, 3], 16)):
        clients = Clients(slots=3)
        for turn, length in zip(turns, (17, 25, 41), strict=True):
            clients.ask(prompt(2, length), **({} if turn is None else {"session": "a", "turn": turn}))
        clients.ask(prompt(1, 17))
        assert clients.ask([*prompt(2, 25), 7]) == expected


@pytest.mark.parametrize("resumes", [{"session": "b"}, {}])
def test_a_snapshot_that_another_session_uses_is_not_superseded(resumes: dict):
    clients = Clients(slots=3)
    clients.ask(prompt(2, 17), session="a")
    assert clients.ask([*prompt(2, 17), *prompt(4, 8)], **resumes) == 16
    clients.ask(prompt(2, 33), session="a")
    clients.ask(prompt(5, 17))
    assert clients.ask([*prompt(2, 17), *prompt(6, 4)]) == 16


def test_a_session_is_of_its_tenant():
    """Another tenant's session of the same id ends, and nothing changes."""
    clients = Clients(10)
    clients.ask(OLD)
    clients.ask(SUBJECT, session="a")
    clients.ask(prompt(9, 1), salt="x", ended_sessions=["a"])
    clients.ask(prompt(3, 12))
    assert len(clients.scheduler.cache.match(hashes_of(clients, SUBJECT))) == 4


class Losses:
    """Observer that notes which tenant loses a block or a snapshot."""

    def __init__(self) -> None:
        self.tenants: dict[BlockHash, str | None] = {}
        self.blocks: list[str | None] = []
        self.snapshots: list[str | None] = []
        self.bytes_of_y: list[float] = []  # in blocks, after each request

    def on_blocks_stored(self, run: PublishedRun) -> None:
        self.tenants |= dict.fromkeys(run.block_hashes, run.salt)

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        self.blocks += [self.tenants[one] for one in block_hashes]

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        pass

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        self.snapshots.append(self.tenants[block_hash])

    def on_cleared(self) -> None:
        raise AssertionError("no reset here")


def losses(
    seed: int, *, has_hints: bool, blocks: int = 64, slots: int | None = None, slabs: SlabLayout | None = None
) -> Losses:
    """Losses of two tenants in a random life; the hints of one change no hit, since its prompts never come back."""
    source = random.Random(seed)
    clients, noted = Clients(blocks, slots, is_new=not has_hints, slabs=slabs), Losses()
    clients.scheduler.cache.add_observer(noted)
    for name in range(60):
        salt, session = source.choice("xy"), source.choice("abc")
        hints: dict[str, object] = {"session": session, "turn": name}
        hints |= source.choice([{}, {}, {"ends_session": True}, {"pause_seconds": 5.0}, {"ended_sessions": ["b"]}])
        tokens = prompt(name, 17)
        clients.ask(tokens, salt, **(hints if has_hints and salt == "x" else {}))
        if slabs is not None:
            size = slabs.blocks_per_slab / slabs.snapshots_per_slab
            noted.bytes_of_y.append(noted.blocks.count("y") + size * noted.snapshots.count("y"))
    return noted


@pytest.mark.parametrize("seed", range(8))
def test_tenants_lose_in_the_order_without_hints(seed: int):
    """SI-8: blocks by themselves, and snapshots by themselves; the entries that one tenant loses are others."""
    for sizes in ({"blocks": 26, "slots": None}, {"blocks": 1000, "slots": 6}):
        without, hinted = (losses(seed, has_hints=has_hints, **sizes) for has_hints in (False, True))
        assert (hinted.blocks, hinted.snapshots) == (without.blocks, without.snapshots)
        assert without.blocks or without.snapshots, "nothing is lost at all"


@pytest.mark.parametrize("seed", range(8))
def test_the_other_tenant_loses_no_snapshot_more(seed: int):
    """Blocks take their snapshots along here, and both are short."""
    without, hinted = (losses(seed, has_hints=has_hints, blocks=26, slots=6) for has_hints in (False, True))
    assert hinted.blocks == without.blocks
    assert hinted.snapshots.count("y") <= without.snapshots.count("y")


@pytest.mark.parametrize("seed", range(8))
def test_the_other_tenant_loses_nothing_earlier_in_a_shared_memory(seed: int):
    """SI-8: where blocks and snapshots go for each other, a tenant may give up more, and never costs another more."""
    gains = 0
    for slabs in (SlabLayout(12, 4, 1), SlabLayout(30, 4, 1), SlabLayout(12, 2, 1), SlabLayout(12, 6, 2)):
        without, hinted = (losses(seed, has_hints=has_hints, slabs=slabs) for has_hints in (False, True))
        for then, now in zip(without.bytes_of_y, hinted.bytes_of_y, strict=True):
            assert now <= then + slabs.blocks_per_slab, "the last slab at most, which blocks leave one by one"
            gains += now < then
        assert hinted.blocks.count("y") <= without.blocks.count("y")
    assert gains, "nothing is given up early"


@POLICIES
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"session": "a", "ends_session": True}, (prompt(1, 17), prompt(2, 17))),
        ({"session": "a", "pause_seconds": 100.0}, (prompt(2, 17), prompt(1, 17))),
    ],
)
def test_hints_are_followed_in_a_shared_memory(policy: EvictionPolicyName, first: dict, then: tuple):
    """SI-8: what is asked for first stays if the second session has ended, or the first one pauses."""
    kept, other = then
    for has_hints, expected in ((False, 0), (True, 16)):
        clients = Clients(policy=policy, slabs=SlabLayout(6, 4, 1))
        for tokens in (kept, other):
            clients.ask(tokens, **(first if has_hints and tokens == prompt(2, 17) else {}))
        clients.ask(prompt(3, 17))
        assert clients.ask(kept) == expected


def test_a_spent_snapshot_that_may_not_go_stays_spent():
    """SI-8: in a shared memory one whose block is in use is passed over until the next request has ended."""
    clients = Clients(slots=8)
    clients.ask(prompt(1, 17))
    clients.ask(prompt(2, 17), session="a")
    clients.ask(prompt(2, 33), session="a")
    cache = clients.scheduler.cache
    oldest, superseded = (hashes_of(clients, prompt(name, 17))[-1] for name in (1, 2))
    order = cache.states._order._others
    assert cache.hints.choose_snapshot(oldest, order, lambda one: one != superseded) == oldest
    clients.ask([99])
    assert cache.hints.choose_snapshot(oldest, order) == superseded


def test_hints_are_ignored_where_nothing_is_kept():
    """Under ref_zero and without a cache."""
    for policy in (EvictionPolicyName.REF_ZERO, None):
        scheduler = Scheduler(make_limits(), policy, b"model")
        params = RequestParams(num_tokens_to_generate=1, cache_hints={"session": "a", "ends_session": True})
        add(scheduler, request := Request(Submission(0, tuple(range(8)), params, 0, 0)))
        step(scheduler)
        assert request.is_ended
        assert scheduler.cache.hints is None


def test_a_cache_without_hints_takes_no_note():
    """The first hint begins it, also for what was cached before."""
    clients = Clients(10, is_new=True)
    clients.ask(OLD)
    assert clients.scheduler.cache.hints is None
    assert clients.ask([*OLD, *prompt(4, 8)], session="a", ends_session=True) == 16
    assert isinstance(clients.scheduler.cache.hints, Hints)
    clients.ask(prompt(5, 24))
    assert clients.ask(OLD) == WHOLE, "what the ended session added has gone, and what it found has not"


def test_the_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """A forgotten session's blocks are ordinary ones."""
    assert MAX_SESSIONS >= 1024
    monkeypatch.setattr("megatron_ext.prefix_cache.hints.MAX_SESSIONS", 2)
    clients = Clients(10)
    clients.ask(OLD)
    clients.ask(SUBJECT, session="a")
    for name in "bc":
        clients.ask([5, 6], session=name)
    clients.ask(NEW, ended_sessions=["a"])
    assert clients.ask(OLD) == 8


@pytest.mark.parametrize("turns", [(None, None), (1, 2)])
def test_a_prompt_that_replaces_nothing_of_another_client(turns: tuple):
    """The blocks and the snapshot of the session's first prompt have the depths of those that it resumes from."""
    clients = Clients(64, slots=8)
    first, other = prompt(2, 17), prompt(3, 17)
    clients.ask(first, session="a", turn=turns[0])
    clients.ask(other)
    assert clients.ask([*other, *prompt(4, 8)], session="a", turn=turns[1]) == 16
    clients.scheduler.check()


def test_what_two_prompts_of_a_session_use_is_not_spent():
    """A key of several conversations: when it ends, blocks of the first conversation do not go for those of others."""
    clients = Clients(64)
    clients.ask(SUBJECT, session="a")
    clients.ask([*SUBJECT[:8], *prompt(5, 8)], session="a", ends_session=True)
    clients.scheduler.check()
    assert clients.ask([*SUBJECT, 1]) == 16


def test_a_snapshot_that_conversations_of_a_session_share_is_not_superseded():
    """A cache key of several conversations with one system prompt."""
    clients, system = Clients(slots=3), prompt(2, 17)
    clients.ask(system, session="a")
    for name in (4, 5):
        clients.ask([*system, *prompt(name, 8)], session="a")
    clients.ask(prompt(6, 17))
    assert clients.ask([*system, *prompt(8, 4)], session="a") == 16


def test_blocks_in_use_are_in_no_queue():
    clients = Clients(64)
    clients.ask(SUBJECT, session="a")
    params = RequestParams(num_tokens_to_generate=8, cache_hints=CacheHints(session="a"))
    add(clients.scheduler, Request(Submission(10**6, (*SUBJECT, 1), params, 10**6, 0)))
    step(clients.scheduler)
    clients.scheduler.check()


def test_hints_follow_blocks_that_move():
    """SI-8: a slab is emptied for a snapshot, and the owners of its blocks are those of their new places."""
    source, clients, moves = random.Random(0), Clients(slabs=SlabLayout(6, 4, 1)), 0
    for name in range(40):
        clients.ask(prompt(name, source.randrange(3, 40)), session=source.choice("ab"))
        moves += clients.scheduler.cache.changes.has_copies
        clients.scheduler.cache.changes_told()
        clients.scheduler.check()
    assert moves


def test_a_replaced_part_that_comes_back():
    """Another client uses what the session has replaced; so the prompt before it is not only the session's."""
    clients = Clients(64)
    clients.ask(SUBJECT, session="a", turn=1)
    clients.ask([*SUBJECT[:8], *prompt(5, 8)], session="a", turn=2)
    clients.ask([*SUBJECT, 1])
    clients.ask([77], ended_sessions=["a"])
    clients.scheduler.check()
    assert clients.ask([*SUBJECT, 1]) == 16


@POLICIES
def test_a_superseded_snapshot_goes_before_blocks_in_a_shared_memory(policy: EvictionPolicyName):
    """SI-8: without hints blocks go that are used again."""
    skipped = []
    for has_hints in (False, True):
        clients = Clients(policy=policy, slabs=SlabLayout(6, 4, 1))
        clients.ask(prompt(1, 17))
        for turn, length in enumerate((9, 17, 25), start=1):
            clients.ask(prompt(2, length), **({"session": "a", "turn": turn} if has_hints else {}))
        skipped.append(clients.ask(prompt(1, 17)) + clients.ask([*prompt(2, 25), 7]))
        clients.scheduler.check()
    assert skipped[1] > skipped[0]


@POLICIES
def test_a_shared_memory_that_is_ample_skips_what_fixed_pools_skip(policy: EvictionPolicyName):
    source, memories = random.Random(1), ({"slots": 400, "blocks": 2000}, {"slabs": SlabLayout(600, 4, 1)})
    prompts = [[source.randrange(2) for _ in range(source.randrange(1, 60))] for _ in range(80)]
    hints = [{"session": source.choice("abc"), "turn": i, "ends_session": i % 9 == 8} for i in range(len(prompts))]
    fixed, shared = (
        [clients.ask(tokens, **given) for tokens, given in zip(prompts, hints, strict=True)]
        for clients in (Clients(policy=policy, **sizes) for sizes in memories)
    )
    assert fixed == shared
    assert sum(fixed) > 0
