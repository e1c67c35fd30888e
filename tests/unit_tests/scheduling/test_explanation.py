"""SI-5: explanations of a request are true, compared with everything ever computed, in lists of tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.prefix_cache.cached_token_ids import MAX_ENDS, CachedTokenIds
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.scheduling.explain_admission import note_end
from megatron_ext.scheduling.explanation import Explanation, MissReason
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, make_limits, request_of, step

LRU, SIZE = EvictionPolicyName.LRU, 4


def make_scheduler(blocks: int = 100, slots: int | None = None, policy: EvictionPolicyName | None = LRU) -> Scheduler:
    limits = make_limits(block_size=SIZE, total_blocks=blocks, max_tokens=100, explains=True)
    return Scheduler(limits, policy, b"model", slots)


def serve(scheduler: Scheduler, tokens: list[int], **params: object) -> tuple[Request, Explanation]:
    request = request_of(len(scheduler.queues), tokens, **({"num_tokens_to_generate": 1} | params))
    add(scheduler, request)
    while not request.is_ended:
        step(scheduler)
    assert request.ledger.explanation is not None
    return request, request.ledger.explanation


def text_of(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 1000) for _ in range(length)]


class TestReasons:
    """Reasons, each in one situation."""

    def test_parted(self):
        scheduler = make_scheduler()
        prompt = text_of(0, 20)
        serve(scheduler, prompt)
        other = [*prompt[:14], 1, *prompt[15:]]
        _, said = serve(scheduler, other)
        assert (said.reason, said.agreeing, said.here, said.there) == ("parted", 14, 1, prompt[14])
        assert (said.skipped, said.matched) == (12, 12)
        assert f"at token 14: here 1, there {prompt[14]}" in said.text()

    def test_a_fork_skips_all_that_its_source_computes(self):
        scheduler = make_scheduler()
        inputs = RequestInputs(tuple(text_of(0, 10)), RequestParams(num_tokens_to_generate=1))
        samples = [Request(arrival, inputs, arrival, seed=0, group=0) for arrival in range(2)]
        add(scheduler, *samples)
        step(scheduler)
        said = samples[1].ledger.explanation
        assert (said.reason, said.skipped, said.matched, said.most) == ("skipped_all", 10, 8, 10)

    def test_a_snapshot_before_the_resume_point_is_of_no_concern(self):
        """The snapshot was given up without loss; none was taken at the position that would skip more."""
        scheduler = make_scheduler(slots=3)
        prompt = text_of(0, 24)
        for length in (6, 14, 24):  # the third leaves two, and the snapshot at 4 gives up its slot
            request, _ = serve(scheduler, prompt[:length])
        _, said = serve(scheduler, [*prompt[:17], 1, 1, 1])
        assert scheduler.cache.eviction_history.snapshot_ago(request.block_hashes[:1]) is not None
        assert (said.reason, said.skipped, said.matched) == ("no_snapshot", 12, 16)

    def test_no_slots(self):
        scheduler = make_scheduler(slots=0)
        serve(scheduler, text_of(0, 20))
        assert serve(scheduler, text_of(0, 20))[1].reason == "no_slots"

    def test_reasons_for_the_whole_prompt(self):
        assert serve(make_scheduler(policy=None), text_of(0, 9))[1].reason == "caching_off"
        assert serve(make_scheduler(), text_of(0, 9), enable_prefix_caching=False)[1].reason == "opted_out"
        assert serve(make_scheduler(), text_of(0, 9), return_log_probs=True)[1].reason == "prompt_logprobs"

    @pytest.mark.parametrize("length", [9, 12])
    def test_the_turn_before_ended_inside_the_block(self, length: int):
        """A turn's last token is never computed, so the block that it would complete is not cached either."""
        scheduler = make_scheduler()
        first, _ = serve(scheduler, text_of(0, length))  # and a generated token
        note_end(first, scheduler.cache, SIZE)
        _, said = serve(scheduler, [*first.tokens, *text_of(1, 7)])
        assert (said.reason, said.agreeing, said.there) == ("turn_ended", length + 1, None)
        assert (said.skipped, said.is_near_miss) == (length // SIZE * SIZE, False)

    def test_the_age_of_the_nearest_prefix(self):
        """Age of the nearest cached block, or of the end inside it; of this salt alone."""
        now = [0.0]
        scheduler = make_scheduler()
        scheduler.cache.cached_token_ids = CachedTokenIds(lambda: now[0])
        prompt = text_of(0, 20)

        def ask(seconds: float, tokens: list[int], **params: object) -> Explanation:
            now[0] = seconds
            return serve(scheduler, tokens, **params)[1]

        assert ask(10, prompt).age is None
        assert ask(20, prompt).age == 10
        assert ask(30, [*prompt[:14], 1, *text_of(1, 6)]).age == 20
        assert ask(40, [*prompt[:14], 1, *text_of(2, 6)]).age == 10, "the block of the third one is the nearest"
        assert ask(50, [*prompt[:16], *text_of(3, 6)]).age == 40, "only blocks before it are cached"
        assert ask(60, prompt, cache_salt="b").age is None
        assert ask(70, [*prompt[:2], *text_of(4, 9)]).age == 60
        now[0] = 75
        short, said = serve(scheduler, prompt[:2])
        note_end(short, scheduler.cache, SIZE)
        assert said.age is None
        assert ask(90, [*short.tokens, *text_of(5, 6)]).age == 15, "the short prompt ended there"


def test_ends_are_bounded_and_go_with_the_block_before():
    known = CachedTokenIds()
    first, second = (bytes([number]) * 32 for number in range(2))
    known.keep_run([second], first, packed_tokens([1] * SIZE), SIZE, SIZE)
    known.keep_end(second, packed_tokens([7]))
    for token in range(MAX_ENDS):
        known.keep_end(first, packed_tokens([token]))
    known.check({second})
    assert known.earlier_end(second, packed_tokens([7] * SIZE)) is None, "the oldest went first"
    assert known.earlier_end(first, packed_tokens([7] * SIZE)).agreeing == 1
    known.keep_end(second, packed_tokens([7]))
    known.drop(second)
    known.check(set())
    assert known.earlier_end(second, packed_tokens([7] * SIZE)) is None
    known.clear()
    assert known.earlier_end(first, packed_tokens([7] * SIZE)) is None


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def live(seed: int, slots: int | None) -> None:
    """Random prompts under two salts, one after the other; each explanation against lists of tokens."""
    source = random.Random(seed)
    scheduler = make_scheduler(source.choice([7, 12, 100]), slots and source.choice([1, 2, slots]))
    served: list[tuple[str, list[int]]] = []
    ended: list[tuple[str, list[int]]] = []
    for _ in range(40):
        salt = source.choice("ab")
        prompt = [source.randrange(2) for _ in range(source.randrange(1, 24))]
        if served and source.random() < 0.5:
            known = source.choice(served)[1]
            prompt = known[: source.randrange(1, len(known) + 1)] + prompt
        prompt = prompt[:24]
        cached = [
            (tokens[: blocks * SIZE])
            for name, tokens in served
            if name == salt
            for blocks in range(1, len(tokens) // SIZE + 1)
            if is_cached(scheduler, salt, tokens, blocks)
        ]
        request, said = serve(scheduler, prompt, cache_salt=salt)
        ends = [len(tokens) for name, tokens in ended if name == salt and prompt[: len(tokens)] == tokens]
        judge(request, said, prompt, cached, ends)
        served.append((salt, prompt))
        if source.random() < 0.5:
            note_end(request, scheduler.cache, SIZE)
            ended.append((salt, list(request.tokens)))


def is_cached(scheduler: Scheduler, salt: str, tokens: list[int], blocks: int) -> bool:
    probe = request_of(0, tokens, cache_salt=salt)
    scheduler._start_chain(probe)
    return len(scheduler.cache.match(probe.block_hashes)) >= blocks


def judge(request: Request, said: Explanation, prompt: list[int], cached: list[list[int]], ends: list[int]) -> None:
    longest = max((common(prompt, one) for one in cached), default=0)
    matched = max((common(prompt, one) // SIZE for one in cached), default=0)
    assert said.skipped == request.ledger.skipped
    assert said.matched == matched * SIZE
    if said.reason == MissReason.TURN_ENDED:
        assert said.agreeing == max(end for end in ends if end <= matched * SIZE + SIZE) >= longest
    elif said.agreeing is not None:
        assert said.agreeing == longest, f"{prompt} parts from {cached} elsewhere"
        assert said.here == prompt[longest]
        assert any(one[:longest] == prompt[:longest] and one[longest : longest + 1] == [said.there] for one in cached)
    if said.reason == MissReason.TURN_ENDED:
        assert matched * SIZE < said.agreeing
    elif said.reason == MissReason.PARTED:
        assert said.agreeing is not None
    elif said.reason == MissReason.NOT_CACHED:
        assert longest == matched * SIZE
    elif said.reason == MissReason.SKIPPED_ALL:
        assert said.skipped in (len(prompt) - 1, (len(prompt) - 1) // SIZE * SIZE, len(prompt) // SIZE * SIZE)
    elif said.reason in (MissReason.NO_SNAPSHOT, MissReason.SNAPSHOT_GIVEN_UP):
        assert said.skipped < min(said.matched, said.most)
    else:
        assert said.reason in (MissReason.TOO_SHORT, MissReason.BLOCK_EVICTED)
        assert (said.reason == MissReason.TOO_SHORT) == (said.most == 0 or len(prompt) < SIZE)


@pytest.mark.parametrize("slots", [None, 30])
@pytest.mark.parametrize("seed", range(3))
def test_random_lives(seed: int, slots: int | None):
    live(seed, slots)


def one_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    divergence = CachedTokenIds.divergence

    def early(self: CachedTokenIds, before: bytes, tokens: object) -> object:
        found = divergence(self, before, tokens)
        return found and dataclasses.replace(found, agreeing=max(0, found.agreeing - 1))

    monkeypatch.setattr(CachedTokenIds, "divergence", early)


def keeps_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedTokenIds, "drop", lambda self, block_hash: None)


@pytest.mark.parametrize("plant", [one_too_early, keeps_what_is_gone])
def test_a_lie_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        lives(None)


def lives(slots: int | None) -> None:
    for seed in range(6):
        live(seed, slots)


@pytest.mark.parametrize("seed", range(4))
def test_more_slots_would_have_kept_evicted_snapshots(seed: int):
    """Snapshots given up would be kept with more slots; those never taken are missing with any number of slots."""
    source = random.Random(seed)
    few, many = make_scheduler(500, 2), make_scheduler(500, 500)
    seen = set()
    for _ in range(60):
        prompt = [source.randrange(2) for _ in range(source.randrange(5, 14))]
        _, said = serve(few, prompt)
        _, unbounded = serve(many, prompt)
        seen.add(said.reason)
        if said.reason == MissReason.SNAPSHOT_GIVEN_UP:
            assert unbounded.skipped > said.skipped
        elif said.reason == MissReason.NO_SNAPSHOT:
            assert unbounded.skipped == said.skipped
    assert {MissReason.SNAPSHOT_GIVEN_UP, MissReason.NO_SNAPSHOT} <= seen
