"""Routing policies: choice of one replica for a prompt.

`least_computed` is the default. The cost of a prompt on a replica, in tokens, is alpha * (tokens of the prompt to
compute there) + (1 - alpha) * (tokens to compute there for other requests). The lowest cost wins. Ties go to the
replica that skips more tokens, then to the less loaded replica, then to the replica that received fewer tokens so far.

A match of less than half of the prompt is usually a common system prompt at the start of a new conversation, which will
grow on its first replica. If the match alone counted, an idle fleet would put all conversations on the first replica,
whose memory cannot hold them. So if that replica holds more tokens than the least loaded one, a short match costs
`CROWDING` times the prompt, times the excess as a share of its memory (or of its tokens, if its memory is not known).
Starting a conversation at a reluctant replica (a warming replica that has had its share, or a replica that is about to
leave) costs `CROWDING` times the prompt.

`longest_prefix`, `first_prefix_block` and `load_balanced` are the rules of megatron-core 0.19, which count requests.
The score of a replica is alpha * (share of the prompt's blocks that it has) + (1 - alpha) * (share of its requests that
are free). A share of blocks counts only if no other replica has more; ties go to the replica that was last sent the
last of these blocks, then to the lowest number. Upstream looks the blocks up in its table of sent blocks; here they are
blocks that replicas hold or are about to compute.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from megatron_ext.config.routing import RoutingConfig, RoutingPolicyName
from megatron_ext.routing.index import Match, PrefixIndex, Replica
from megatron_ext.routing.prompt import Prompt

_FEW = 12  # replicas; up to this number they are compared directly, not searched in the order of all


class Loads:
    """Replicas, by the number of their bit, in the order of their loads.

    Among equal loads the replica that received the fewest tokens so far comes first, so that an idle fleet fills
    evenly.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int, int]] = []  # (load, given, number), sorted
        self._entries: dict[int, tuple[int, int, int]] = {}

    def join(self, number: int) -> None:
        """Add a replica without load; its received tokens start at the minimum of the others."""
        given = min((entry[1] for entry in self._order), default=0)
        self._put(number, 0, given)

    def leave(self, number: int) -> None:
        """Remove a replica."""
        entry = self._entries.pop(number)
        del self._order[bisect_left(self._order, entry)]

    def load(self, number: int) -> int:
        """Return the load of a replica in tokens."""
        return self._entries[number][0]

    def shift(self, number: int, tokens: int, given: int = 0) -> None:
        """Add tokens to the load of a replica, or subtract them; `given` of them it receives from this router now."""
        load, before, _ = self._entries[number]
        assert load + tokens >= 0, f"{-tokens} tokens of {load} taken"
        self.leave(number)
        self._put(number, load + tokens, before + given)

    def _put(self, number: int, load: int, given: int) -> None:
        entry = load, given, number
        self._entries[number] = entry
        insort(self._order, entry)

    def least(self, bits: int) -> int:
        """Return the number of the least loaded replica among `bits`, at least one of which is set."""
        if bits.bit_count() <= _FEW:
            return min(self._entries[number] for number in numbers(bits))[2]
        return next(number for _, _, number in self._order if bits >> number & 1)

    def lowest(self) -> int:
        """Return the lowest load of all replicas; 0 without replicas."""
        return self._order[0][0] if self._order else 0


def numbers(bits: int) -> list[int]:
    """Return the positions of the set bits, the lowest first."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


CROWDING = 2.0
SCORED = (RoutingPolicyName.LONGEST_PREFIX.value, RoutingPolicyName.FIRST_PREFIX_BLOCK.value)


@dataclass(frozen=True)
class Decision:
    """Routing decision for a request.

    Attributes:
        replica: Name of the replica.
        skipped: Tokens of the prompt that the replica is expected to skip.
    """

    replica: str
    skipped: int


@dataclass
class Fleet:
    """State of the fleet that policies read.

    Attributes:
        loads: Loads of all replicas.
        indexes: Prefix indexes by block size.
        reluctant: Bits of the replicas at which new conversations had better not start.
        last: Number of the replica chosen last by round robin.
        replicas: Replicas by number.
    """

    loads: Loads = field(default_factory=Loads)
    indexes: dict[int, PrefixIndex] = field(default_factory=dict)
    reluctant: int = 0
    last: int = -1
    replicas: dict[int, Replica] = field(default_factory=dict)

    def eager(self, replicas: int) -> int:
        """Return the bits of `replicas` without the reluctant ones; all of them if all are reluctant."""
        return replicas & ~self.reluctant or replicas

    def crowding(self, one: int, other: int, length: int, tokens: int) -> float:
        """Return the extra cost, in tokens, of starting at `one` instead of `other` because of a short match."""
        if 2 * tokens >= length:
            return 0.0
        if self.reluctant >> one & 1:
            return CROWDING * length
        held, others = self.replicas[one].held, self.replicas[other].held
        return CROWDING * length * (held - others) / (self.replicas[one].capacity or held) if held > others else 0.0

    def chosen(self, prompt: Prompt, number: int) -> Decision:
        """Return the decision for a replica."""
        one = self.replicas[number]
        return Decision(one.name, next((tokens for tokens, _ in one.index.levels(prompt, one.bit)), 0))


Chooser = Callable[[Fleet, Prompt, int], Decision]  # the int has the bits of the candidates, and is not 0


def chooser(settings: RoutingConfig) -> Chooser:
    """Return the policy that the settings select."""
    alpha = settings.alpha
    choosers: dict[RoutingPolicyName, Chooser] = {
        RoutingPolicyName.LEAST_COMPUTED: partial(_cheapest, alpha=alpha),
        RoutingPolicyName.LONGEST_PREFIX: partial(_scored, alpha=alpha, matched=PrefixIndex.longest),
        RoutingPolicyName.FIRST_PREFIX_BLOCK: partial(_scored, alpha=alpha, matched=PrefixIndex.first),
        RoutingPolicyName.LOAD_BALANCED: _balanced,
        RoutingPolicyName.ROUND_ROBIN: _in_turn,
    }
    return choosers[RoutingPolicyName(settings.policy)]


def _cheapest(fleet: Fleet, prompt: Prompt, replicas: int, alpha: float) -> Decision:
    """Choose by cost among the least loaded replicas of each level of skipped tokens, until no level can win."""
    loads, length = fleet.loads, len(prompt)
    least, cost = _start(fleet, length, replicas, alpha)
    number, skipped = least, 0
    floor = (1 - alpha) * loads.lowest()
    for index in fleet.indexes.values():
        for tokens, bits in index.levels(prompt, replicas & index.members):
            one = loads.least(fleet.eager(bits) if 2 * tokens < length else bits)
            computed = length - tokens + fleet.crowding(one, least, length, tokens)
            its = alpha * computed + (1 - alpha) * loads.load(one)
            is_alike = its == cost and tokens == skipped  # with another block size
            if (
                its < cost
                or (its == cost and tokens > skipped)
                or (is_alike and loads.least(1 << one | 1 << number) == one)
            ):
                number, skipped, cost = one, tokens, its
            if alpha * (length - tokens + 1) + floor > cost:
                break
    return Decision(fleet.replicas[number].name, skipped) if skipped else fleet.chosen(prompt, number)


def _start(fleet: Fleet, length: int, replicas: int, alpha: float) -> tuple[int, float]:
    """Return the replica at which a prompt without any match starts, and its cost."""
    loads = fleet.loads
    number = loads.least(fleet.eager(replicas))
    cost = alpha * length + (1 - alpha) * loads.load(number)
    reluctant = replicas & fleet.reluctant
    if reluctant and not fleet.reluctant >> number & 1:
        one = loads.least(reluctant)
        its = alpha * (1 + CROWDING) * length + (1 - alpha) * loads.load(one)
        if its < cost:
            return one, its
    return number, cost


def _scored(
    fleet: Fleet,
    prompt: Prompt,
    replicas: int,
    alpha: float,
    matched: Callable[[PrefixIndex, Prompt, int], Match | None],
) -> Decision:
    """Choose by Megatron's score; a prompt without complete blocks goes to the replica with the fewest requests."""
    shares: dict[int, float] = {}
    last: dict[int, int] = {}
    is_keyed = False
    for size, index in fleet.indexes.items():
        is_keyed |= bool(prompt.keys(size))
        found = matched(index, prompt, replicas & index.members)
        if found is None:
            continue
        for number in numbers(found.replicas):
            shares[number] = found.share
            last[number] = fleet.replicas[number].assignments.get(found.key, 0)
    if not is_keyed:
        return _balanced(fleet, prompt, replicas)

    def order(number: int) -> tuple[float, int, int]:
        one = fleet.replicas[number]
        free = max(0, one.slots - one.pending) / one.slots
        return -(alpha * shares.get(number, 0.0) + (1.0 - alpha) * free), -last.get(number, 0), number

    return fleet.chosen(prompt, min(numbers(replicas), key=order))


def _balanced(fleet: Fleet, prompt: Prompt, replicas: int) -> Decision:
    """Choose the replica with the fewest requests, the lowest number of several."""
    return fleet.chosen(prompt, min(numbers(replicas), key=lambda number: fleet.replicas[number].pending))


def _in_turn(fleet: Fleet, prompt: Prompt, replicas: int) -> Decision:
    """Choose the replica of the next higher bit, or else of the lowest."""
    later = replicas >> (fleet.last + 1) << (fleet.last + 1) or replicas
    fleet.last = (later & -later).bit_length() - 1
    return fleet.chosen(prompt, fleet.last)
