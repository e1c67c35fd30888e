"""The policies: of the replicas that are open, the one that runs a prompt.

What it costs to run a prompt somewhere, in tokens: alpha * (tokens of it that are computed there)
+ (1 - alpha) * (tokens that are yet to be computed there for others). The least is taken; among equal ones that which
skips more, then the less loaded one, then the one that was given less so far.

A match of less than half of the prompt is mostly what many conversations begin with, and the prompt a new one that
will grow where it begins. Were the match all that counts, an idle fleet would put them all on the first replica, whose
memory does not hold them. So where that replica holds more than the least loaded one, a short match costs `CROWDING`
times the prompt for the share that it holds more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ext.config.routing import RoutingConfig, RoutingPolicyName
from megatron_ext.routing.index import PrefixIndex
from megatron_ext.routing.loads import Loads
from megatron_ext.routing.prompt import Prompt

CROWDING = 2.0


@dataclass
class Fleet:
    """What policies look at.

    Attributes:
        loads: Of all replicas.
        indexes: By block size.
        members: Bits of the replicas of each block size.
        open: Bits of those that take one more request.
        last: Number of the one that had its turn last.
    """

    loads: Loads = field(default_factory=Loads)
    indexes: dict[int, PrefixIndex] = field(default_factory=dict)
    members: dict[int, int] = field(default_factory=dict)
    open: int = 0
    last: int = -1
    held: Callable[[int], int] = lambda number: 0  # tokens that the replica of a bit's number holds, by its events

    def crowding(self, one: int, other: int, length: int, tokens: int) -> float:
        """What it costs, in tokens, to begin at `one` and not at `other` for the sake of a short match."""
        if 2 * tokens >= length:
            return 0.0
        mine, others = self.held(one), self.held(other)
        return CROWDING * length * (mine - others) / mine if mine > others else 0.0

    def max_skipped(self, prompt: Prompt, replicas: int) -> int:
        """Tokens that the best of some skips."""
        levels = (index.levels(prompt, replicas & self.members[size]) for size, index in self.indexes.items())
        return max((next(level, (0, 0))[0] for level in levels), default=0)


@dataclass(frozen=True)
class Choice:
    """A replica by the number of its bit.

    Attributes:
        number: Of its bit.
        skipped: Tokens that it skips.
        max_skipped: The most that any of those asked about skips; 0 where nobody looked.
    """

    number: int
    skipped: int
    max_skipped: int = 0


Chooser = Callable[[Fleet, Prompt, int], Choice]  # the bits are of those to choose from, of which there is one


def chooser(settings: RoutingConfig) -> Chooser:
    """The policy that the settings name."""
    alpha = settings.alpha
    return {
        RoutingPolicyName.LONGEST_PREFIX: lambda fleet, prompt, replicas: _longest(fleet, prompt, replicas, alpha),
        RoutingPolicyName.FIRST_PREFIX_BLOCK: lambda fleet, prompt, replicas: _first(fleet, prompt, replicas, alpha),
        RoutingPolicyName.LOAD_BALANCED: _balanced,
        RoutingPolicyName.ROUND_ROBIN: _in_turn,
    }[RoutingPolicyName(settings.policy)]


def _longest(fleet: Fleet, prompt: Prompt, replicas: int, alpha: float) -> Choice:
    """Of each level of skipped tokens the least loaded one; levels that cannot win any more are not looked at."""
    loads, length = fleet.loads, len(prompt)
    least = loads.least(replicas)
    number, skipped, most = least, 0, 0
    cost = alpha * length + (1 - alpha) * loads.load(number)
    floor = (1 - alpha) * loads.lowest()
    for size, index in fleet.indexes.items():
        for tokens, bits in index.levels(prompt, replicas & fleet.members[size]):
            most = max(most, tokens)
            one = loads.least(bits)
            computed = length - tokens + fleet.crowding(one, least, length, tokens)
            its = alpha * computed + (1 - alpha) * loads.load(one)
            is_alike = its == cost and tokens == skipped  # in blocks of another size
            if (
                its < cost
                or (its == cost and tokens > skipped)
                or (is_alike and loads.least(1 << one | 1 << number) == one)
            ):
                number, skipped, cost = one, tokens, its
            if alpha * (length - tokens + 1) + floor > cost:
                break
    return Choice(number, skipped or (most and fleet.max_skipped(prompt, 1 << number)), most)


def _first(fleet: Fleet, prompt: Prompt, replicas: int, alpha: float) -> Choice:
    """As if who has the first block had the whole prompt, and who has not had nothing."""
    loads = fleet.loads
    having = 0
    for size, index in fleet.indexes.items():
        having |= index.having_first(prompt, replicas & fleet.members[size])
    number = loads.least(replicas)
    if having:
        one = loads.least(having)
        if alpha + (1 - alpha) * loads.load(one) <= alpha * len(prompt) + (1 - alpha) * loads.load(number):
            number = one
    return Choice(number, fleet.max_skipped(prompt, 1 << number), fleet.max_skipped(prompt, having))


def _balanced(fleet: Fleet, prompt: Prompt, replicas: int) -> Choice:
    number = fleet.loads.least(replicas)
    return Choice(number, fleet.max_skipped(prompt, 1 << number))


def _in_turn(fleet: Fleet, prompt: Prompt, replicas: int) -> Choice:
    """The next higher bit, or the lowest."""
    behind = replicas >> (fleet.last + 1) << (fleet.last + 1) or replicas
    fleet.last = (behind & -behind).bit_length() - 1
    return Choice(fleet.last, fleet.max_skipped(prompt, 1 << fleet.last))
