"""Explanations of prefix cache use: why a request skipped this many tokens and not more (SI-5)."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass


class Reason(str, enum.Enum):
    """Reason why a prompt token was computed: the first that applies, in this order."""

    OPTED_OUT = "opted_out"
    CACHING_OFF = "caching_off"
    PROMPT_LOGPROBS = "prompt_logprobs"  # requested, so nothing is skipped
    NOT_CACHED = "not_cached"  # no block matched there
    NO_SNAPSHOT = "no_snapshot"  # blocks matched beyond the resume position
    PARTIAL_BLOCK = "partial_block"  # the tail that fills no block
    LAST_TOKEN = "last_token"  # computed even where its block is cached


class Why(str, enum.Enum):
    """Reason why no more was skipped: the first that applies, apart from those of `Reason` for a whole prompt."""

    TOO_SHORT = "too_short"  # the prompt has no block that could be skipped
    SKIPPED_ALL = "skipped_all"  # all that can be skipped of a prompt of this length
    NO_SLOTS = "no_slots"  # there are no slots for states at all
    SNAPSHOT_GIVEN_UP = "snapshot_given_up"  # the blocks are cached, their states were evicted
    NO_SNAPSHOT = "no_snapshot"  # the blocks are cached without states at their ends, or with opportunistic ones only
    BLOCK_EVICTED = "block_evicted"  # the next block was cached and evicted
    PARTED = "parted"  # the prompt differs from the nearest cached prefix
    NOT_CACHED = "not_cached"  # no cached block follows the match


_NEAR_MISSES = frozenset(
    why.value for why in (Why.PARTED, Why.BLOCK_EVICTED, Why.SNAPSHOT_GIVEN_UP, Why.NO_SNAPSHOT, Why.NO_SLOTS)
)


@dataclass(frozen=True)
class Explanation:
    """Explanation of what a request skipped; positions are in tokens from the start of the prompt.

    Attributes:
        reason: Value of `Why` or of `Reason`.
        skipped: Tokens that the request skipped.
        matched: Tokens in cached blocks that the request shares.
        most: Maximum number of tokens that a prompt of this length can skip.
        agreeing: Tokens that agree with the nearest cached prefix of the same salt; None if no such prefix was looked
            for.
        here: Token of this request after the agreeing ones.
        there: Token of the cached prefix at that position; must not be shown to other users.
        ago: Requests admitted since the missing entry was evicted.
        slots_short: Additional snapshot slots that would have kept the entry under `lru`; None if slots are not the
            cause.
        block_size: Tokens of a block.
    """

    reason: str
    skipped: int
    matched: int
    most: int
    block_size: int
    agreeing: int | None = None
    here: int | None = None
    there: int | None = None
    ago: int | None = None
    slots_short: int | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the fields and the sentence as a dict for JSON."""
        return dataclasses.asdict(self) | {"text": self.text()}

    @property
    def is_near_miss(self) -> bool:
        """True if a part of the prompt was cached and more could have been skipped."""
        return self.reason in _NEAR_MISSES

    @property
    def depth(self) -> int:
        """Tokens from the start of the prompt that were known to the cache, or are by now."""
        return self.matched if self.agreeing is None else self.agreeing

    def without_cached_token(self) -> Explanation:
        """Return a copy that reveals positions and tokens of this request only, no token of another one."""
        return dataclasses.replace(self, there=None)

    def text(self) -> str:
        """Return the explanation as one sentence."""
        size = self.block_size
        if self.reason == Why.PARTED.value:
            return f"{self._divergence_text()}; computing began at {self.skipped}"
        when = "" if self.ago is None else f" {self.ago} request{'s' * (self.ago != 1)} ago"
        sentences = {
            Why.TOO_SHORT.value: f"too short: {size} tokens make a block",
            Why.SKIPPED_ALL.value: f"all {self.skipped} tokens that can be skipped were",
            Why.NO_SLOTS.value: f"{self.matched} tokens are cached, and there are no slots for their states",
            Why.SNAPSHOT_GIVEN_UP.value: f"{self.matched} tokens are cached; states before {self._goal()} were "
            f"evicted{when} to free a slot{self._missing_slots_text()}; computing began at {self.skipped}",
            Why.NO_SNAPSHOT.value: f"{self.matched} tokens are cached, and there is no snapshot of states between "
            f"{self.skipped} and {self._goal()}",
            Why.BLOCK_EVICTED.value: f"the block after token {self.matched} was evicted{when} to free memory; "
            f"computing began at {self.skipped}",
            Why.NOT_CACHED.value: f"no cached prefix continues after token {self.matched}",
            Reason.OPTED_OUT.value: "the request opted out of the cache",
            Reason.CACHING_OFF.value: "the cache is off",
            Reason.PROMPT_LOGPROBS.value: "prompt log-probs were requested, so nothing is skipped",
        }
        sentence = sentences[self.reason]
        return sentence if self.agreeing is None else f"{sentence}. {self._divergence_text()}"

    def _divergence_text(self) -> str:
        assert self.agreeing is not None, "it parted somewhere"
        there = "" if self.there is None else f", there {self.there}"
        return (
            f"{self.agreeing} tokens agree with a cached prefix, which diverges in block "
            f"{self.agreeing // self.block_size} at token {self.agreeing}: here {self.here}{there}"
        )

    def _missing_slots_text(self) -> str:
        if self.slots_short is None:
            return ""
        return f" ({self.slots_short} more slot{'s' * (self.slots_short > 1)} would have kept them)"

    def _goal(self) -> int:
        return min(self.matched, self.most)
