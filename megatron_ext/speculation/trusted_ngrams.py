"""N-grams beside another drafter: they draft where a long one matches that has been right in this request (SP-20).

A longer match of prompt lookup costs nothing and gives as many drafts as wanted, but in prose the words after it often
differ. So each match is a guess that is compared with the tokens that come, whether or not it was verified. The drafts
of a request are the n-gram's if it has at least `SHORTEST` tokens and at least `TRUSTED` of the tokens guessed so far
in this request were right; else they are the other drafter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.speculation.drafter import DraftAsk, Drafter
from megatron_ext.speculation.ngram import NgramIndex

SHORTEST = 4  # tokens of an n-gram
TRUSTED = 0.8  # share of right guesses


@dataclass(frozen=True)
class TrustedGuess:
    """Guess of a request's n-grams that is preferred to the other drafter's.

    Attributes:
        tokens: Guessed tokens, at least one.
        likelihood: Probability that a token is right, given that those before it are.
    """

    tokens: tuple[int, ...]
    likelihood: float


class GuessRecord:
    """Guesses of one request's n-grams, and how many of them were right.

    Args:
        lengths: Tokens of the n-grams, the longest first.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._index = NgramIndex(lengths)
        self._guess: tuple[int, ...] = ()
        self._end = 0  # tokens before the guess
        self._right, self._judged = 0, 0  # guessed tokens

    def guess(self, tokens: Sequence[int], limit: int) -> TrustedGuess | None:
        """Return the guess after `tokens`, at most `limit` of them; None without a match, or if it is not trusted.

        Args:
            tokens: Tokens of the request; they begin with those of the previous call.
            limit: Maximum number of tokens; not more than in a previous call with the same tokens.
        """
        if len(tokens) != self._end:
            self._judge(tokens)
            self._index.take_in(tokens)
            self._guess, self._end = self._index.guess(tokens, limit), len(tokens)
        if not self._guess or self._right < TRUSTED * max(1, self._judged):
            return None
        return TrustedGuess(self._guess[:limit], self._right / self._judged)

    def _judge(self, tokens: Sequence[int]) -> None:
        """Count the right tokens of the last guess, and the first wrong one."""
        for guessed, came in zip(self._guess, tokens[self._end : self._end + len(self._guess)], strict=False):
            self._judged += 1
            if guessed != came:
                return
            self._right += 1


class NgramsBeside:
    """Drafter that prefers trusted n-grams to the drafts of another drafter, request by request.

    Args:
        drafter: Drafter of the requests without a trusted n-gram.
        longest: Tokens of the longest n-gram to look for; the shortest has `SHORTEST`.
    """

    def __init__(self, drafter: Drafter, longest: int = SHORTEST) -> None:
        self._drafter = drafter
        self._lengths = tuple(range(max(longest, SHORTEST), SHORTEST - 1, -1))
        self._records: dict[int, GuessRecord] = {}

    def trusted(self, asks: Sequence[DraftAsk]) -> Mapping[int, TrustedGuess]:
        """Return the trusted guesses by request id; requests without one are left to the other drafter."""
        found = {}
        for ask in asks:
            record = self._records.get(ask.request_id)
            if record is None:
                record = self._records[ask.request_id] = GuessRecord(self._lengths)
            guess = record.guess(ask.tokens, ask.limit)
            if guess is not None:
                found[ask.request_id] = guess
        return found

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """Propose drafts; see `Drafter`. The other drafter computes for the remaining requests only."""
        guesses = {name: guess.tokens for name, guess in self.trusted(asks).items()}
        others = [ask for ask in asks if ask.request_id not in guesses]
        return {**(self._drafter.propose(others) if others else {}), **guesses}

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Pass on the result; guesses of n-grams are judged by the tokens themselves."""
        self._drafter.accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """Drop the guesses of a request; see `Drafter`."""
        self._records.pop(request_id, None)
        self._drafter.forget(request_id)
