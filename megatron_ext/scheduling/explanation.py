"""Explanations of prefix cache use: why a request skipped this many tokens and not more (SI-5)."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.matching import last_boundary, resume_position
from megatron_ext.scheduling.accounting import Reason, general_reason
from megatron_ext.scheduling.plan import Admission
from megatron_ext.scheduling.request import Request


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

    def without_there(self) -> Explanation:
        """Return a copy that reveals positions and tokens of this request only, no token of another one."""
        return dataclasses.replace(self, there=None)

    def text(self) -> str:
        """Return the explanation as one sentence."""
        size = self.block_size
        if self.reason == Why.PARTED.value:
            return f"{self._where_it_parted()}; computing began at {self.skipped}"
        gone = "" if self.ago is None else f" {self.ago} request{'s' * (self.ago != 1)} ago"
        sentences = {
            Why.TOO_SHORT.value: f"too short: {size} tokens make a block",
            Why.SKIPPED_ALL.value: f"all {self.skipped} tokens that can be skipped were",
            Why.NO_SLOTS.value: f"{self.matched} tokens are cached, and there are no slots for their states",
            Why.SNAPSHOT_GIVEN_UP.value: f"{self.matched} tokens are cached; states before {self._goal()} were "
            f"given up{gone} for want of a slot{self._what_would_do()}; computing began at {self.skipped}",
            Why.NO_SNAPSHOT.value: f"{self.matched} tokens are cached, and no snapshot of states stands between "
            f"{self.skipped} and {self._goal()}",
            Why.BLOCK_EVICTED.value: f"the block behind token {self.matched} was given up{gone} for want of memory; "
            f"computing began at {self.skipped}",
            Why.NOT_CACHED.value: f"nothing that is cached goes on behind token {self.matched}",
            Reason.OPTED_OUT.value: "the request opted out of the cache",
            Reason.CACHING_OFF.value: "the cache is off",
            Reason.PROMPT_LOGPROBS.value: "prompt log-probs were asked for, so nothing is skipped",
        }
        said = sentences[self.reason]
        return said if self.agreeing is None else f"{said}. {self._where_it_parted()}"

    def _where_it_parted(self) -> str:
        assert self.agreeing is not None, "it parted somewhere"
        there = "" if self.there is None else f", there {self.there}"
        return (
            f"{self.agreeing} tokens agree with a cached prefix; they part in block "
            f"{self.agreeing // self.block_size} at token {self.agreeing}: here {self.here}{there}"
        )

    def _what_would_do(self) -> str:
        if self.slots_short is None:
            return ""
        return f" ({self.slots_short} more slot{'s' * (self.slots_short > 1)} would have kept them)"

    def _goal(self) -> int:
        return min(self.matched, self.most)


def explain_admission(admission: Admission, cache: PrefixCache, block_size: int) -> None:
    """Store the explanation in the request's ledger on its first admission."""
    ledger = admission.request.sequence.ledger
    if ledger.explanation is None:
        matched, start = len(admission.matched), admission.chunk.start
        ledger.explanation = explain(admission.request, cache, matched, start, block_size)


def explain(request: Request, cache: PrefixCache, matched: int, start: int, block_size: int) -> Explanation:
    """Explain the admission of a request, before anything is allocated for it.

    Args:
        request: Request that is admitted now.
        cache: Prefix cache in its present state.
        matched: Cached blocks that the request shares.
        start: Resume position of the request.
        block_size: Tokens of a block.
    """
    length = len(request.tokens)
    most = last_boundary(length, block_size)
    if cache.states is None:
        most = resume_position(length, length // block_size * block_size)
    blank = Explanation("", start, matched * block_size, most, block_size)
    general = general_reason(request.params, is_caching=cache.is_enabled)
    if general is not None:
        return dataclasses.replace(blank, reason=general.value)
    if most == 0 or length < block_size:
        return dataclasses.replace(blank, reason=Why.TOO_SHORT.value)
    if start == most:
        return dataclasses.replace(blank, reason=Why.SKIPPED_ALL.value)
    goal = min(matched * block_size, most)
    if start < goal:
        return _parted(request, cache, _without_states(request, cache, blank, goal), matched)
    return _behind_the_match(request, cache, blank, matched)


def _without_states(request: Request, cache: PrefixCache, blank: Explanation, goal: int) -> Explanation:
    """Explain a resume position before `goal`: the blocks up to there are cached, and no snapshot is."""
    assert cache.states is not None, "without recurrent layers nothing else is needed"
    if cache.states.total == 0:
        return dataclasses.replace(blank, reason=Why.NO_SLOTS.value)
    size = blank.block_size
    gone = cache.ghosts.last_snapshot(request.block_hashes[blank.skipped // size : goal // size])
    if gone is None:
        return dataclasses.replace(blank, reason=Why.NO_SNAPSHOT.value)
    is_ordered = cache.policy_name is not EvictionPolicyName.FLOPS  # ordered by last use, so that slots can be counted
    short = gone.slots_short if is_ordered else None
    return dataclasses.replace(blank, reason=Why.SNAPSHOT_GIVEN_UP.value, ago=gone.ago, slots_short=short)


def _behind_the_match(request: Request, cache: PrefixCache, blank: Explanation, matched: int) -> Explanation:
    """Explain why no more matched, given that everything that matched was skipped."""
    block_hashes = request.block_hashes
    if matched < len(block_hashes):
        ago = cache.ghosts.block_ago(block_hashes[matched])
        if ago is not None:
            return dataclasses.replace(blank, reason=Why.BLOCK_EVICTED.value, ago=ago)
    found = _parted(request, cache, blank, matched)
    reason = Why.NOT_CACHED if found.agreeing is None else Why.PARTED
    return dataclasses.replace(found, reason=reason.value)


def _parted(request: Request, cache: PrefixCache, blank: Explanation, matched: int) -> Explanation:
    """Add where the tokens part from the nearest cached prefix after the match, if one continues from there."""
    chain, size = request.sequence.chain, blank.block_size
    assert chain is not None, "it reads the cache"
    before = request.block_hashes[matched - 1] if matched else chain.root
    following = request.sequence.packed[matched * size : (matched + 1) * size]
    divergence = None if cache.cached_token_ids is None else cache.cached_token_ids.divergence(before, following)
    agreeing = matched * size + (0 if divergence is None else divergence.agreeing)
    if divergence is None or agreeing == 0 or agreeing == len(request.tokens):
        return blank
    return dataclasses.replace(blank, agreeing=agreeing, here=request.sequence.packed[agreeing], there=divergence.there)
