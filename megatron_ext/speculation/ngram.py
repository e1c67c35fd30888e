"""Prompt lookup: propose the tokens that followed the same n-gram before in the request's own prompt and output.

The lookup needs no model and one pass: each n-gram is hashed once, when a token has followed it, so a step costs as
many hashes as there are new tokens (SP-1). Texts that repeat themselves (edits, extraction, code) have long correct
drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ext.speculation.drafter import Drafter, DraftRequest

LONGEST, SHORTEST = 4, 2  # default n-gram lengths, in tokens
KEPT_TOKENS = 16_384  # per generation of a request's index; two generations cover its last 16,384 to 32,768 tokens
MAX_AT_ONCE = 8_192  # tokens that one request's index takes in per step; a long prompt takes several steps


class NgramDrafter(Drafter):
    """Drafter that repeats what followed the longest known n-gram; the most recent occurrence counts.

    Args:
        longest: Tokens of the longest n-gram to look for.
        shortest: Tokens of the shortest n-gram to look for.
    """

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        assert 1 <= shortest <= longest, (shortest, longest)
        self._lengths = tuple(range(longest, shortest - 1, -1))
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`. One request's drafts depend on nothing but its own tokens."""
        return {request.request_id: self._guess(request) for request in requests}

    def _guess(self, request: DraftRequest) -> tuple[int, ...]:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._lengths)
        index.take_in(request.tokens)
        return index.guess(request.tokens, request.limit)

    def forget(self, request_id: int) -> None:
        """Drop the request's index."""
        self._indexes.pop(request_id, None)

    def reset(self) -> None:
        """Drop all indexes."""
        self._indexes.clear()


class NgramIndex:
    """Last positions at which the n-grams of one sequence were followed by a token, bounded by two generations.

    Args:
        lengths: Tokens of the n-grams, the longest first.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._young: dict[int, int] = {}  # hash of an n-gram -> position after it
        self._old: dict[int, int] = {}
        self._ending: tuple[int, list[int]] = 0, []  # where `guess` looked last, and hashes of the n-grams there
        self._begun_at = 0  # first position in the newer of the two generations of the index
        self._end = 0  # n-grams that end at or before this position are indexed; a token follows each of them

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def take_in(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that a token follows by now. `tokens` begins with the tokens of the previous call."""
        end = min(len(tokens) - 1, self._end + MAX_AT_ONCE)
        if end <= self._end:
            return
        if end - self._begun_at > KEPT_TOKENS:
            self._old, self._young, self._begun_at = self._young, {}, self._end
        if self._ending[0] == end == self._end + 1:  # usual case of one new token per step
            self._young.update(dict.fromkeys(self._ending[1], end))
            self._end = end
            return
        for n in self._lengths:
            first = max(n, self._end + 1)  # position after the first new n-gram of n tokens
            if first <= end:
                run = tokens[first - n : end]
                grams = zip(*(run[i : len(run) - n + 1 + i] for i in range(n)), strict=True)
                self._young.update(zip(map(hash, grams), range(first, end + 1), strict=True))
        self._end = end

    def guess(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that followed the longest known n-gram at the end of `tokens`; or empty.

        A repetition that reaches up to the end is continued: "a b a b" follows "a b a b".
        """
        last = tuple(tokens[-self._lengths[0] :])
        endings = [last[len(last) - n :] for n in self._lengths if n <= len(last)]
        keys = [hash(ending) for ending in endings]
        self._ending = len(tokens), keys
        for ending, key in zip(endings, keys, strict=True):
            position = self._young.get(key) or self._old.get(key)
            if position is not None and tuple(tokens[position - len(ending) : position]) == ending:  # no collision
                return _going_on(tokens[position : position + limit], limit)
        return ()


def _going_on(found: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return `found`, which ends at the last token of the sequence if it is short, repeated up to `limit` tokens."""
    times = -(-limit // len(found))
    return (tuple(found) * times)[:limit]
