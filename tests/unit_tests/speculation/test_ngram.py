"""Prompt lookup: against a search through all tokens, with bounded memory and work (SP-1)."""

from __future__ import annotations

import random

import pytest

from megatron_ext.speculation import ngram
from megatron_ext.speculation.drafter import DraftRequest
from megatron_ext.speculation.ngram import NgramDrafter, NgramIndex


def searched(tokens: list[int], limit: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Drafts of prompt lookup, searched from the end: the longest n-gram first, its most recent occurrence."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                found = tokens[end:]
                return tuple((found * limit)[:limit])
    return ()


def guesses(drafter: NgramDrafter, tokens: list[int], limit: int, request_id: int = 0) -> tuple[int, ...]:
    return drafter.propose([DraftRequest(request_id, tokens, limit)]).get(request_id, ())


@pytest.mark.parametrize("seed", range(20))
def test_drafts_equal_a_search(seed):
    """SP-1: drafts equal a search at every length of a growing text, however many tokens came since the last call."""
    source = random.Random(seed)
    vocabulary, longest, shortest = source.choice([2, 3, 6]), source.choice([1, 3, 5]), 1
    drafter = NgramDrafter(longest, shortest)
    tokens: list[int] = []
    while len(tokens) < 150:
        tokens += [source.randrange(vocabulary) for _ in range(source.choice([1, 1, 2, 7]))]
        limit = source.randrange(1, 9)
        assert guesses(drafter, tokens, limit) == searched(tokens, limit, longest, shortest), tokens


def test_a_request_that_ended_is_forgotten():
    drafter = NgramDrafter()
    guesses(drafter, [1, 2, 3, 1, 2], 3)
    drafter.forget(0)
    drafter.forget(5)  # that had no drafts
    assert guesses(drafter, [8, 8, 8, 9, 1, 2], 3) == ()


def test_another_gram_of_the_same_hash_is_not_taken_for_it():
    """Hash collisions do not match: in CPython -1 and -2 have one hash, so tokens must be compared."""
    assert hash((-1, 5)) == hash((-2, 5))
    index = NgramIndex((2,))
    index.take_in([-1, 5, 40, 1, 2])
    assert index.guess([-1, 5, 40, 1, 2, -2, 5], 1) == ()
    assert index.guess([-1, 5, 40, 1, 2, -1, 5], 1) == (40,)


class TestBounds:
    """Work and memory of one request are bounded."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(ngram, "KEPT_TOKENS", 100)
        monkeypatch.setattr(ngram, "MAX_AT_ONCE", 40)

    def test_each_gram_is_hashed_once(self, monkeypatch):
        hashed = []
        monkeypatch.setattr(ngram, "hash", lambda gram: hashed.append(gram) or hash(gram), raising=False)
        index, tokens = NgramIndex((3, 2)), []
        for token in range(30):
            tokens.append(token)
            index.take_in(tokens)
        assert len(hashed) == len(set(hashed)) == (29 - 1) + (29 - 2)
        hashed.clear()
        drafter, tokens = NgramDrafter(3, 2), []
        for token in range(30):  # an n-gram is known once a token follows it
            tokens.append(token)
            guesses(drafter, tokens, 4)
        assert len(hashed) == len(set(hashed)) == (30 - 1) + (30 - 2)

    def test_a_long_prompt_is_taken_in_bit_by_bit(self):
        tokens = [*range(70), 0, 1]
        drafter = NgramDrafter()
        assert guesses(drafter, tokens, 2) == (2, 3)
        late = [*range(200, 270), *range(70), 50, 51]
        assert guesses(drafter, late, 2, request_id=1) == ()  # 40 tokens of it
        assert [guesses(drafter, late, 2, request_id=1) for _ in range(3)] == [(), (), (52, 53)]

    def test_the_younger_generation_goes_first(self):
        """The last continuation of an n-gram counts, though the older generation knows it as well."""
        index = NgramIndex((2,))
        tokens = [1, 2, 50, *range(100, 220), 1, 2, 60, *range(300, 310)]
        while index._end < len(tokens) - 1:
            index.take_in(tokens)
        gram = hash((1, 2))
        assert gram in index._old
        assert gram in index._young
        assert index.guess([*tokens, 1, 2], 1) == (60,)

    def test_memory_is_two_generations(self):
        index, tokens = NgramIndex((2,)), []
        for token in range(1000):
            tokens.append(token)
            index.take_in(tokens)
            assert len(index) <= 200
        assert index.guess([*tokens, 950, 951], 1) == (952,)
        assert index.guess([*tokens, 10, 11], 1) == ()
