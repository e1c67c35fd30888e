"""Reference model of a scheduler with a prefix cache, by brute force: all results follow from lists of tokens.

No block hashes, no reference counts, no chains, no ledgers: a cached block is a prefix of tokens, a block is in use if
a table names it, and a key is being computed if some running request has yet to publish it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.request_events import EventType

Key = tuple[str | None, tuple[int, ...]]  # salt, all tokens up to the end of the block


@dataclass(eq=False)
class Owner:
    """Request as the model knows it."""

    name: int
    prompt: int
    to_generate: int
    tokens: list[int]
    salt: str | None = None
    opts_out: bool = False
    wants_prompt_scores: bool = False

    place: str = "waiting"
    table: list[int] = field(default_factory=list)
    computed: int = 0
    published: int = 0  # blocks from the start whose contents are cached, or were when it began
    era: int = 0  # of its admission: how often everything had been reset before
    tokens_at_admission: int = 0

    known: set[int] = field(default_factory=set)  # positions that were skipped or computed at any time
    skipped: int = 0
    again: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first_match: int | None = None
    steps: int = 0
    events: list[EventType] = field(default_factory=lambda: [EventType.ADD_ENGINE])
    has_waited: bool = False
    was_admitted: bool = False
    charged: int = 0  # work of those that overtook it
    claim: int = 0  # blocks from its start that are kept for it as long as all of them are cached

    @property
    def reads(self) -> bool:
        return not self.opts_out and not self.wants_prompt_scores

    @property
    def is_alive(self) -> bool:
        return self.place != "ended"

    def key(self, index: int, size: int) -> Key:
        """Key of block `index`, for blocks of `size` tokens."""
        return self.salt, tuple(self.tokens[: (index + 1) * size])

    def keys(self, size: int) -> list[Key]:
        """Keys of all complete blocks."""
        return [self.key(i, size) for i in range(len(self.tokens) // size)]


class World:
    """Blocks by number, with their contents and owners."""

    def __init__(self, block_size: int, total: int, policy: EvictionPolicyName) -> None:
        self.size, self.total, self.policy = block_size, total, policy
        self.owners: list[Owner] = []
        self.cached: dict[Key, int] = {}
        self.left_at: dict[Key, int] = {}  # cached, not in use: when the last owner left
        self.spared: set[Key] = set()  # what requests match that are about to enter
        self.evicted = 0
        self.era = 0
        self._clock = self._next_block = 0

    # Questions

    def is_current(self, owner: Owner) -> bool:
        """Return whether nothing was reset since its admission."""
        return owner.era == self.era

    def in_use(self, without: list[Owner] | None = None) -> set[int]:
        """Blocks in the tables of all owners, or of all but some."""
        return {block for owner in self.owners if owner not in (without or []) for block in owner.table}

    @property
    def available(self) -> int:
        return self.total - len(self.in_use())

    def match(self, owner: Owner) -> list[int]:
        """Blocks of the longest cached run."""
        blocks = []
        for key in owner.keys(self.size):
            if key not in self.cached:
                break
            blocks.append(self.cached[key])
        return blocks

    def being_computed(self) -> dict[Key, set[int]]:
        """Keys that running requests will publish within their prefill, and by whom."""
        keys: dict[Key, set[int]] = {}
        for owner in self.owners:
            if owner.place in ("running", "paused") and self.is_current(owner) and not owner.opts_out:
                for i in range(owner.published, owner.tokens_at_admission // self.size):
                    keys.setdefault(owner.key(i, self.size), set()).add(owner.name)
        return keys

    # Changes

    def share(self, owner: Owner, blocks: list[int]) -> None:
        """`owner` is about to enter with these cached blocks."""
        owner.table = list(blocks)
        self._note_use(owner)

    def take(self, owner: Owner, count: int) -> None:
        """Give `owner` so many blocks, evicting the oldest leaves."""
        while count > self.total - len(self.in_use() | set(self.cached.values())):
            self._evict()  # which may let others go that were kept because of it
        owner.table += range(self._next_block, self._next_block + count)
        self._next_block += count

    def _evict(self) -> None:
        leaves = [key for key in self.left_at if not self._has_child(key)]
        assert leaves, "a block is taken that is not there"
        oldest = min([key for key in leaves if key not in self.spared] or leaves, key=self._age)
        first_of_new = self._clock + 1
        for key in sorted([key for key in self.left_at if self._age(key) < self._age(oldest)], key=self._age):
            assert key in self.spared
            self._clock += 1
            is_older = self.left_at[key] < first_of_new
            ends = range(len(key[1]), 0, -1) if is_older else ()
            for before in [(key[0], key[1][:end]) for end in ends]:
                if before in self.left_at:
                    self.left_at[before] = self._clock
        del self.left_at[oldest], self.cached[oldest]
        self.evicted += 1
        self.drop_unclaimed()

    def _age(self, key: Key) -> tuple[int, int]:
        return self.left_at[key], -len(key[1])

    def drop_unclaimed(self) -> None:
        """KV-4: under ref_zero an unused block stays only for requests that waited for it."""
        if self.policy is not EvictionPolicyName.REF_ZERO:
            return
        claims = [owner.key(owner.claim - 1, self.size) for owner in self.owners if owner.claim]
        kept = {
            (salt, tokens[:end])
            for salt, tokens in claims
            if (salt, tokens) in self.cached
            for end in range(len(tokens) + 1)
        }
        for key in self.left_at.keys() - kept:
            del self.left_at[key], self.cached[key]

    def _has_child(self, key: Key) -> bool:
        return any(other[0] == key[0] and other[1][: -self.size] == key[1] for other in self.cached)

    def publish(self, owner: Owner) -> None:
        """All complete blocks that `owner` has computed are cached."""
        if owner.opts_out or not self.is_current(owner):
            return
        for i in range(owner.published, owner.computed // self.size):
            owner.table[i] = self.cached.setdefault(owner.key(i, self.size), owner.table[i])
        owner.published = owner.computed // self.size
        self._note_use(owner)

    def _note_use(self, owner: Owner) -> None:
        for key in [key for key in self.left_at if self.cached[key] in owner.table]:
            del self.left_at[key]

    def release(self, owner: Owner) -> None:
        """Release the blocks of `owner`: unused ones are dropped, or age."""
        held, owner.table, owner.computed, owner.published = set(owner.table), [], 0, 0
        self._clock += 1
        for key in [key for key, block in self.cached.items() if block in held - self.in_use()]:
            self.left_at[key] = self._clock
        self.drop_unclaimed()

    def reset(self) -> None:
        """Drop all cached contents, and publish nothing that was begun before."""
        self.cached, self.left_at = {}, {}
        self.era += 1


def content(owner: Owner, end: int) -> object:
    """Content on which KV at `end` - 1 and states after `end` tokens depend."""
    return owner.salt, owner.era, owner.tokens[:end]


class Memory:
    """KV contents: at each place of each block, the content on which the KV of a token depends, or None."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._places: dict[tuple[int, int], object] = {}

    def write(self, table: list[int], owner: Owner, positions: range) -> None:
        """A forward writes these positions of `owner`, whose blocks are `table`."""
        for position in positions:
            self._places[table[position // self._size], position % self._size] = content(owner, position + 1)

    def holds(self, table: list[int], owner: Owner, end: int) -> bool:
        """Return whether attention finds in `table` the KV of all tokens below `end`."""
        places = ((table[position // self._size], position % self._size) for position in range(end))
        return all(self._places.get(place) == content(owner, i + 1) for i, place in enumerate(places))

    def spoil(self, blocks: set[int]) -> None:
        """A forward that wrote to these blocks has failed."""
        self._places = {place: content for place, content in self._places.items() if place[0] not in blocks}

    def lose(self) -> None:
        """Drop everything."""
        self._places = {}
