"""Explanations of prefix cache use: why a request skipped this many tokens and not more (SI-5)."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass


class Reason(str, enum.Enum):
    """Reason why a prompt token was computed: the first that applies, in this order."""

    OPTED_OUT = "opted_out"
    CACHING_OFF = "caching_off"
    PROMPT_LOGPROBS = "prompt_logprobs"  # requested, and not kept with the blocks
    NO_ROUTING_INDICES = "no_routing_indices"  # recorded, and not kept with the blocks
    NOT_CACHED = "not_cached"  # no block matched there
    RETOKENIZED = "retokenized"  # no block matched there, since an earlier turn has other tokens for the text
    NO_SNAPSHOT = "no_snapshot"  # blocks matched beyond the resume position
    PARTIAL_BLOCK = "partial_block"  # the tail that fills no block
    LAST_TOKEN = "last_token"  # computed even where its block is cached


class MissReason(str, enum.Enum):
    """Reason why no more was skipped: the first that applies, unless a `Reason` applies to the whole prompt."""

    TOO_SHORT = "too_short"  # the prompt has no block that could be skipped
    SKIPPED_ALL = "skipped_all"  # all that can be skipped of a prompt of this length
    NO_LOG_PROBS = "no_log_probs"  # the blocks are cached, and their log-probs, which were requested, are not kept
    NO_ROUTING_INDICES = "no_routing_indices"  # the blocks are cached, and their routing indices are not kept
    NO_SLOTS = "no_slots"  # there are no slots for states at all
    SNAPSHOT_GIVEN_UP = "snapshot_given_up"  # the blocks are cached, their states were evicted
    NO_SNAPSHOT = "no_snapshot"  # the blocks are cached without states at their ends, or with opportunistic ones only
    BLOCK_EVICTED = "block_evicted"  # the next block was cached and evicted
    RETOKENIZED = "retokenized"  # an earlier turn of the conversation has other tokens for the same text
    PARTED = "parted"  # the prompt differs from the nearest cached prefix
    TURN_ENDED = "turn_ended"  # an earlier request ended inside the next block, which therefore was not cached
    NOT_CACHED = "not_cached"  # no cached block follows the match


_NEAR_MISSES = (
    MissReason.RETOKENIZED,
    MissReason.PARTED,
    MissReason.BLOCK_EVICTED,
    MissReason.SNAPSHOT_GIVEN_UP,
    MissReason.NO_SNAPSHOT,
    MissReason.NO_SLOTS,
)


Excerpt = tuple[str, str]
"""Text of a prompt before and after a place."""

MARK = "►"  # of the place in the sentence
_SLOTS_FLAG = "--inference-dynamic-batching-prefix-caching-mamba-gb"
_UNITS = (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1))
_ADVICE: dict[str, str] = {
    MissReason.TOO_SHORT: "Nothing needs to change: so short a prompt is computed quickly.",
    MissReason.NO_LOG_PROBS: "Nothing needs to change: this request leaves log-probs for those after it.",
    MissReason.NO_ROUTING_INDICES: "Nothing needs to change: this request leaves them for those after it.",
    MissReason.NO_SLOTS: f"Start the server with memory for snapshots ({_SLOTS_FLAG}).",
    MissReason.SNAPSHOT_GIVEN_UP: f"Send requests with the same beginning closer together, or start the server "
    f"with more memory for snapshots ({_SLOTS_FLAG}).",
    MissReason.NO_SNAPSHOT: "Declare where prompts part in cache_checkpoint, so that the first request leaves "
    "states there; this one does for those after it, if a slot is free.",
    MissReason.BLOCK_EVICTED: "Send requests with the same beginning closer together, or start the server with "
    "more memory for the KV cache (--inference-dynamic-batching-buffer-size-gb).",
    MissReason.RETOKENIZED: "Send the answer back as it came, thinking and spaces included, or with its token ids; "
    "what a chat template changes in it, and what follows, is computed again.",
    MissReason.PARTED: "Keep the beginning of prompts the same to the character, and put what changes, such as "
    "a date or an id, after it; an answer that the server no longer remembers may have other tokens unless it is "
    "sent back with its token ids.",
    MissReason.TURN_ENDED: "Nothing needs to change: each turn computes the tokens after the last complete "
    "block again.",
    MissReason.NOT_CACHED: "Send this prompt's beginning again with the same key and cache_salt: it is cached "
    "from now on.",
    Reason.OPTED_OUT: "Leave out enable_prefix_caching, or set it to true.",
    Reason.CACHING_OFF: "Start the server with prefix caching on.",
    Reason.PROMPT_LOGPROBS: "Leave out log-probs of the prompt; with --prefix-cache-log-probs, only "
    "alternatives to its tokens.",
}


@dataclass(frozen=True)
class Explanation:
    """Explanation of what a request skipped; positions are in tokens from the start of the prompt.

    Attributes:
        reason: Value of `MissReason` or of `Reason`.
        skipped: Tokens that the request skipped.
        from_disk: Skipped tokens that entries put back from disk have saved.
        matched: Tokens in cached blocks that the request shares.
        most: Maximum number of tokens that a prompt of this length can skip.
        agreeing: Tokens that agree with the nearest cached prefix of the same salt, or with the earlier request that
            ended there; None if no such prefix was looked for.
        here: Token of this request after the agreeing ones.
        there: Token of the cached prefix at that position; must not be shown to other users.
        ago: Requests admitted since the missing entry was evicted.
        age: Seconds since the nearest prefix of the same salt was cached, or since the earlier request ended.
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
    age: float | None = None
    from_disk: int = 0

    def to_dict(self, excerpt: Excerpt | None = None) -> dict[str, object]:
        """Return the fields, the sentence and the advice as a dict for JSON.

        Args:
            excerpt: Text of the prompt before and after `place`, which replaces token ids in the sentence.
        """
        fields = dataclasses.asdict(self)
        if self.age is not None:
            fields["age"] = round(self.age, 1)
        if excerpt is not None:
            fields["before"], fields["after"] = excerpt
        return fields | {"text": self.text(excerpt), "advice": self.advice}

    @property
    def place(self) -> int | None:
        """Position of the first token that no cached prefix has; None if nothing before it was cached."""
        if self.agreeing is None and self.reason in (MissReason.NOT_CACHED, MissReason.BLOCK_EVICTED):
            return self.matched or None
        return self.agreeing

    @property
    def is_near_miss(self) -> bool:
        """True if a part of the prompt was cached and more could have been skipped."""
        return self.reason in _NEAR_MISSES

    @property
    def depth(self) -> int:
        """Tokens from the start of the prompt that were known to the cache, or are by now."""
        return self.matched if self.agreeing is None else self.agreeing

    def text(self, excerpt: Excerpt | None = None) -> str:
        """Return the explanation as one sentence; see `to_dict`."""
        from_disk = f"; {self.from_disk} of the skipped tokens came from disk" if self.from_disk else ""
        return self._text(excerpt) + from_disk

    def _text(self, excerpt: Excerpt | None) -> str:
        size = self.block_size
        if self.reason == MissReason.PARTED:
            return f"{self._divergence_text(excerpt)}; computing began at {self.skipped}"
        when = "" if self.ago is None else f" {self.ago} request{'s' * (self.ago != 1)} ago"
        sentences: dict[str, str] = {
            MissReason.TOO_SHORT: f"too short: {size} tokens make a block",
            MissReason.SKIPPED_ALL: f"all {self.skipped} tokens that can be skipped were",
            MissReason.NO_LOG_PROBS: f"{self.matched} tokens are cached, and not all of their log-probs, which were "
            f"requested; computing began at {self.skipped}",
            MissReason.NO_ROUTING_INDICES: f"{self.matched} tokens are cached, and not all of their routing indices; "
            f"computing began at {self.skipped}",
            MissReason.NO_SLOTS: f"{self.matched} tokens are cached, and there are no slots for their states",
            MissReason.SNAPSHOT_GIVEN_UP: f"{self.matched} tokens are cached; states before {self._goal()} were "
            f"evicted{when} to free memory; computing began at {self.skipped}",
            MissReason.NO_SNAPSHOT: f"{self.matched} tokens are cached, and no snapshot of states lies between "
            f"{self.skipped} and {self._goal()}",
            MissReason.BLOCK_EVICTED: f"the block after token {self.matched}{_marked(excerpt)} was evicted{when} to "
            f"free memory; computing began at {self.skipped}",
            MissReason.RETOKENIZED: f"an earlier answer has other tokens from token {self.agreeing}{_marked(excerpt)} "
            f"on; computing began at {self.skipped}",
            MissReason.TURN_ENDED: f"the turn before ended{self._ago_text()} inside this block, at token "
            f"{self.agreeing}{_marked(excerpt)}; only complete blocks of {size} tokens are cached; computing began at "
            f"{self.skipped}",
            MissReason.NOT_CACHED: f"no cached prefix continues after token {self.matched}{_marked(excerpt)}",
            Reason.OPTED_OUT: "the request opted out of the cache",
            Reason.CACHING_OFF: "the cache is off",
            Reason.PROMPT_LOGPROBS: "prompt log-probs were requested, so nothing is skipped",
        }
        sentence = sentences[self.reason]
        if self.agreeing is None or self.reason in (MissReason.TURN_ENDED, MissReason.RETOKENIZED):
            return sentence
        return f"{sentence}. {self._divergence_text(excerpt)}"

    @property
    def advice(self) -> str | None:
        """One sentence on how the next such request skips more; None if it cannot."""
        return _ADVICE.get(self.reason)

    def _divergence_text(self, excerpt: Excerpt | None) -> str:
        assert self.agreeing is not None, "it parted somewhere"
        nearest = "a cached prefix" if self.age is None else f"a prefix cached{self._ago_text()}"
        parting = f": here {self.here}, there {self.there}" if excerpt is None else _marked(excerpt)
        return (
            f"{self.agreeing} tokens agree with {nearest}, which diverges in block "
            f"{self.agreeing // self.block_size} at token {self.agreeing}{parting}"
        )

    def _ago_text(self) -> str:
        if self.age is None:
            return ""
        unit, seconds = next(one for one in _UNITS if self.age >= 2 * one[1] or one[1] == 1)
        return f" {self.age / seconds:.0f} {unit} ago"

    def _goal(self) -> int:
        return min(self.matched, self.most)


def _marked(excerpt: Excerpt | None) -> str:
    """Return the text around a place with a mark there, as a parenthesis; line breaks are escaped."""
    return "" if excerpt is None else f" ({json.dumps(f'{excerpt[0]}{MARK}{excerpt[1]}', ensure_ascii=False)})"
