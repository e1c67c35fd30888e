"""Drafters that know the coming tokens and use them in various ways, and engines with and without them.

`Knowing` is told what each request generated without speculation. `compare` asserts that both engines did the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megatron_ext.config import CacheConfig
from megatron_ext.speculation.drafter import Drafter, DraftRequest
from tests.unit_tests.support.driver import Driver, assert_logits_close, assert_states_close
from tests.unit_tests.support.models import VOCABULARY

COUNTS = ("matched_block_count", "skipped_prefill_token_count", "computed_prefill_token_count", "prefill_reasons")
PendingOutput = Callable[[DraftRequest, tuple[int, ...], random.Random], object]


def wrong(ask: DraftRequest, coming: tuple[int, ...], source: random.Random) -> object:
    """Never what comes."""
    return tuple((token + 1) % VOCABULARY for token in coming)


def right(ask: DraftRequest, coming: tuple[int, ...], source: random.Random) -> object:
    """Always what comes."""
    return coming


def right_for_a_while(ask: DraftRequest, coming: tuple[int, ...], source: random.Random) -> object:
    """Right for 0 up to all tokens, then wrong."""
    count = source.randint(0, len(coming))
    return (*coming[:count], *((token + 1) % VOCABULARY for token in coming[count:]))


def any_token(ask: DraftRequest, coming: tuple[int, ...], source: random.Random) -> object:
    """Tokens of the vocabulary, and as many as it likes."""
    return tuple(source.randrange(VOCABULARY) for _ in range(source.randint(0, ask.limit)))


def nonsense(ask: DraftRequest, coming: tuple[int, ...], source: random.Random) -> object:
    """Return invalid drafts half of the time, or raise."""
    bad = source.choice([(VOCABULARY,), (-1,), (2**40,), None, 7, "text", (1.5,), (0,) * (ask.limit + 1), LookupError])
    if bad is LookupError:
        raise LookupError("nothing like it")
    return source.choice([bad, coming])


ANSWERS: Mapping[str, PendingOutput] = {
    answer.__name__: answer for answer in (wrong, right, right_for_a_while, any_token, nonsense)
}


class Knowing(Drafter):
    """Drafter that knows what its requests will generate.

    Args:
        answer: Function from the true tokens to drafts.
        seed: Seed of its choices.

    Attributes:
        truth: Request id -> all tokens of prompt and generation; nothing is proposed for others.
        told: Reported verifications.
        forgotten: Requests that have ended.
    """

    def __init__(self, answer: PendingOutput, seed: int = 0) -> None:
        self.truth: dict[int, Sequence[int]] = {}
        self.told: list[tuple[int, int, int]] = []
        self.forgotten: list[int] = []
        self._answer = answer
        self._source = random.Random(seed)

    def propose(self, asks: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        return {ask.request_id: self._drafts(ask) for ask in asks if ask.request_id in self.truth}

    def _drafts(self, ask: DraftRequest) -> object:
        assert ask.limit >= 1
        truth, known = self.truth[ask.request_id], len(ask.tokens)
        assert list(ask.tokens) == list(truth[:known]), "it has another past than without speculation"
        return self._answer(ask, tuple(truth[known : known + ask.limit]), self._source)

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted >= 1
        self.told.append((request_id, drafted, accepted))

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


class Pair:
    """Identical requests, one group after the other, for an engine without drafts and for others with them.

    Args:
        build: Function from keywords of `Driver` to a driver.
        settings: Settings of all drivers.
    """

    def __init__(self, build: Callable[..., Driver], **settings: object) -> None:
        self._build = build
        self._settings = settings
        self.plain = build(**settings)

    def speculating(self, drafter: Knowing, count: int, **settings: object) -> Driver:
        """An engine that verifies up to `count` drafts."""
        return self._build(**(self._settings | settings), speculative_tokens=count, drafter=drafter)

    def truth(self) -> dict[int, Sequence[int]]:
        """Prompts and generated tokens of the plain engine's requests."""
        records = self.plain.records
        return {name: (*record.prompt_tokens, *record.generated_tokens) for name, record in records.items()}


def caching(mode: str | None, slots: int = 20) -> CacheConfig:
    """Off, or with snapshots in this mode."""
    if mode is None:
        return CacheConfig(enable_prefix_caching=False)
    return CacheConfig(snapshot_slots=slots, snapshot_mode=mode)


def assert_same(actual: Driver, expected: Driver) -> None:
    """Every request of `actual` gave what it gave in `expected`: tokens, texts, log-probs, logits, states."""
    assert actual.records.keys() == expected.records.keys()
    for request_id in actual.records:
        assert_same_record(actual, expected, request_id)
        assert_same_insides(actual, expected, request_id)


def assert_same_record(actual: Driver, expected: Driver, request_id: int) -> None:
    """Check that the parts of a record that a user sees are equal."""
    one, other = actual.records[request_id], expected.records[request_id]
    assert one.generated_tokens == other.generated_tokens
    for name in ("generated_text", "finish_reason", "status", "prompt_tokens"):
        assert getattr(one, name) == getattr(other, name), name
    assert len(one.generated_log_probs) == len(one.generated_tokens)
    probs = torch.tensor(one.generated_log_probs), torch.tensor(other.generated_log_probs)
    assert_logits_close(*probs, f"request {request_id}, log-probs")
    if one.generated_top_n_log_probs is not None:
        pairs = zip(one.generated_top_n_log_probs, other.generated_top_n_log_probs, strict=True)
        for here, there in pairs:
            assert here.keys() == there.keys()
            assert_logits_close(torch.tensor([*here.values()]), torch.tensor([here and there[k] for k in here]))


def assert_same_insides(actual: Driver, expected: Driver, request_id: int) -> None:
    """Check logits after every token, and the states that each step left."""
    one, other = actual.seen[request_id], expected.seen[request_id]
    for position, logits in _each(one.logits):
        if position in other.logits:
            name = f"request {request_id}, logits behind {position} tokens"
            assert_logits_close(logits, other.logits[position][0], name)
    for position, (conv, ssm) in _each(one.states):
        if position in other.states:
            name = f"request {request_id}, states behind {position} tokens"
            assert_states_close(conv, other.states[position][0][0], f"{name}, convolution")
            assert_states_close(ssm, other.states[position][0][1], f"{name}, recurrence")


def _each(by_position: Mapping[int, Sequence]) -> Iterator[tuple[int, object]]:
    return ((position, value) for position, values in by_position.items() for value in values)


def assert_same_cache(actual: Driver, expected: Driver) -> None:
    """Check that both caches find equal blocks and snapshots, and that snapshots hold equal states."""
    caches = [driver.scheduler.cache for driver in (actual, expected)]
    block_hashes = [set(cache.index.block_hashes()) for cache in caches]
    assert block_hashes[0] == block_hashes[1], "other blocks are cached"
    if caches[0].states is None:
        return
    here, there = (cache.states._visible for cache in caches)
    assert here.keys() == there.keys(), "there are other snapshots"
    assert caches[0].use() == caches[1].use()
    pools = actual.context.allocated.snapshots, expected.context.allocated.snapshots
    for block_hash, slot in here.items():
        assert_states_close(pools[0].conv[:, slot], pools[1].conv[:, there[block_hash]], "a snapshot, convolution")
        assert_states_close(pools[0].ssm[:, slot], pools[1].ssm[:, there[block_hash]], "a snapshot, recurrence")
    for one, other in zip(actual.records.values(), expected.records.values(), strict=True):
        for name in COUNTS:
            assert getattr(one, name) == getattr(other, name), name
