"""RP-2, RP-3: any life of a fleet against brute force, which looks at every replica and every block."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.choosing import CROWDING, Loads
from megatron_ext.routing.index import Holders, PrefixIndex
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router
from tests.on_request import long_except
from tests.unit_tests.support.planted import assert_found

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
SALTS = st.sampled_from([None, None, "x"])
Prefix = tuple[str | None, tuple[int, ...]]  # salt and tokens: whole blocks


@dataclass
class Copy:
    """A replica: what it holds, by what it is, never by hashes."""

    size: int
    has_states: bool
    held: set[Prefix] = field(default_factory=set)
    states: set[Prefix] = field(default_factory=set)
    given: int = 0  # tokens, as `Loads` counts them
    number: int = 0
    is_warming: bool = False
    own: int = 0  # prompt tokens to compute since it joined
    all: int = 0  # of all replicas
    sated: bool = False

    @property
    def tokens(self) -> int:
        return len(self.held) * self.size


@dataclass
class Sent:
    """A request in flight."""

    replica: str
    prompt: Prefix
    to_compute: int
    to_generate: int
    is_prefilled: bool = False


def blocks(prompt: Prefix, size: int) -> list[Prefix]:
    salt, tokens = prompt
    return [(salt, tokens[:end]) for end in range(size, len(tokens) + 1, size)]


class RouterMachine(RuleBasedStateMachine):
    """Replicas join, die, fill and evict; requests come and go."""

    alphas = st.sampled_from([0.5, 0.5, 1.0, 0.0, 0.25])

    def __init__(self) -> None:
        super().__init__()
        self.router: Router | None = None
        self.copies: dict[str, Copy] = {}
        self.sent: dict[int, Sent] = {}
        self.names = self.requests = 0

    def name_of(self, replica: str, prefix: Prefix) -> int:
        """Name that a replica gives to a block; other replicas use other names."""
        return hash((replica, "block", prefix))

    @precondition(lambda self: self.router is None)
    @rule(alpha=alphas)
    def begin(self, alpha: float) -> None:
        self.alpha = alpha
        self.router = Router(RoutingConfig(alpha=alpha))

    @precondition(lambda self: self.router is not None and len(self.copies) < 4)
    @rule(size=st.sampled_from([2, 2, 3]), has_states=st.booleans())
    def join(self, size: int, has_states: bool) -> None:
        name = f"replica {self.names}"
        self.names += 1
        self.router.join(name, size, has_states=has_states)
        number = next(i for i in range(9) if i not in {copy.number for copy in self.copies.values()})
        given = min((copy.given for copy in self.copies.values()), default=0)
        is_warming = any(copy.held for copy in self.copies.values())
        self.copies[name] = Copy(size, has_states, given=given, number=number, is_warming=is_warming)

    def a_replica(self, data: st.DataObject) -> tuple[str, Copy]:
        name = data.draw(st.sampled_from(sorted(self.copies)), "replica")
        return name, self.copies[name]

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name, _ = self.a_replica(data)
        lost = {request for request, one in self.sent.items() if one.replica == name}
        assert set(self.router.leave(name)) == lost
        del self.copies[name]
        for request in lost:
            del self.sent[request]

    # What replicas hold

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), tokens=TOKENS, salt=SALTS)
    def fill(self, data: st.DataObject, tokens: tuple[int, ...], salt: str | None) -> None:
        """A run from somewhere on; what is known may be told again."""
        name, copy = self.a_replica(data)
        run = blocks((salt, tokens), copy.size)
        known = next((i for i, one in enumerate(run) if one not in copy.held), len(run))
        first = data.draw(st.integers(0, known), "first block of the run")
        if first == len(run):
            return
        extra = [[salt], *[None] * (len(run) - 1)] if salt is not None and first == 0 else None
        parent = self.name_of(name, run[first - 1]) if first else None
        hashes = [self.name_of(name, one) for one in run[first:]]
        self.router.members[name].stored(hashes, parent, tokens[first * copy.size : len(run) * copy.size], extra)
        copy.held |= set(run)
        if copy.has_states and data.draw(st.booleans(), "a snapshot at its end"):
            self.router.members[name].state_stored([hashes[-1]])
            copy.states.add(run[-1])

    @precondition(lambda self: any(copy.held for copy in self.copies.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A leaf goes, or a snapshot alone."""
        name = data.draw(st.sampled_from(sorted(name for name, copy in self.copies.items() if copy.held)), "replica")
        copy = self.copies[name]
        if copy.states and data.draw(st.booleans(), "a snapshot alone"):
            gone = data.draw(st.sampled_from(sorted(copy.states, key=repr)), "snapshot")
            self.router.members[name].state_removed([self.name_of(name, gone), 12345])
            copy.states.remove(gone)
            return
        leaves = [one for one in copy.held if not any(o != one and o in copy.held for o in self.continuing(copy, one))]
        gone = data.draw(st.sampled_from(sorted(leaves, key=repr)), "block")
        self.router.members[name].removed([self.name_of(name, gone), 12345])
        copy.held.remove(gone)
        copy.states.discard(gone)

    def continuing(self, copy: Copy, prefix: Prefix) -> list[Prefix]:
        salt, tokens = prefix
        return [one for one in copy.held if one[0] == salt and one[1][: len(tokens)] == tokens]

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        name, copy = self.a_replica(data)
        self.router.members[name].cleared()
        copy.held.clear()
        copy.states.clear()

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def lose_events(self, data: st.DataObject) -> None:
        """A run that continues what was never told is left out."""
        name, copy = self.a_replica(data)
        self.router.members[name].stored([1], 999, [0] * copy.size)
        self.router.members[name].state_stored([999])

    # Requests

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), tokens=TOKENS, salt=SALTS, new=st.sampled_from([0, 3, 1000]), goes=st.booleans())
    def request(self, data: st.DataObject, tokens: tuple[int, ...], salt: str | None, new: int, goes: bool) -> None:
        held = sorted({one for copy in self.copies.values() for one in copy.held}, key=repr)
        if held and data.draw(st.booleans(), "goes on from what is held"):
            salt, before = data.draw(st.sampled_from(held), "from")
            tokens = before + tokens[: data.draw(st.integers(0, 3), "tokens more")]
        exclude = data.draw(st.sets(st.sampled_from([*sorted(self.copies), "stranger"]), max_size=2), "excluded")
        prompt = Prompt(tokens, salt)
        decision = self.router.route(prompt, exclude)
        possible = [name for name in self.copies if name not in exclude]
        if not possible:
            assert decision is None
            return
        costs = self.costs(possible, (salt, tokens))
        name = costs[0][-1]
        assert (decision.replica, decision.skipped) == (name, self.skipped(name, (salt, tokens))), costs
        if not goes:
            return
        self.requests += 1
        self.router.began(self.requests, decision, prompt, new)
        one = Sent(name, (salt, tokens), max(1, len(tokens) - decision.skipped), min(new, 256))
        self.sent[self.requests] = one
        self.copies[name].given += one.to_compute + one.to_generate
        self.share(name, one.to_compute)

    def share(self, name: str, tokens: int) -> None:
        """A warming replica that holds less than half the average has had its share if it got more than one n-th."""
        count, total = len(self.copies), sum(copy.tokens for copy in self.copies.values())
        for other, copy in self.copies.items():
            copy.is_warming = copy.is_warming and 2 * copy.tokens < total / count
            copy.all += tokens
            copy.own += tokens * (other == name)
            copy.sated = copy.is_warming and copy.own > copy.all / count

    def load(self, name: str) -> int:
        return sum(one.to_compute + one.to_generate for one in self.sent.values() if one.replica == name)

    def costs(self, possible: list[str], prompt: Prefix) -> list[tuple[object, ...]]:
        """Costs of the least loaded replica as if it skipped nothing, and of the least loaded with an equal skip.

        Of reluctant replicas they are higher, unless the match is half of the prompt.
        """
        length, alike = len(prompt[1]), {}
        for name in possible:
            alike.setdefault((self.copies[name].size, self.skipped(name, prompt)), []).append(name)
        starts = [
            (self.alpha * (1 + dear) * length + (1 - self.alpha) * self.load(name), dear, name)
            for dear, names in ((0, self.eager(possible)), (CROWDING, self.reluctant(possible)))
            for name in sorted(names, key=self.order)[:1]
        ]
        if not self.eager(possible):
            starts = [(self.alpha * length + (1 - self.alpha) * self.load(name), 0, name) for *_, name in starts]
        cost, _, least = min(starts)
        found = [(cost, 0, *self.order(least), least)]
        for (_, skipped), names in alike.items():
            if skipped:
                eager = self.eager(names) if 2 * skipped < length else names
                one = min(eager or names, key=self.order)
                computed = length - skipped + self.crowding(one, least, length, skipped)
                cost = self.alpha * computed + (1 - self.alpha) * self.load(one)
                found.append((cost, -skipped, *self.order(one), one))
        return sorted(found)

    def reluctant(self, names: list[str]) -> list[str]:
        return [name for name in names if self.copies[name].sated]

    def eager(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.reluctant(names)]

    def order(self, name: str) -> tuple[int, int, int]:
        return self.load(name), self.copies[name].given, self.copies[name].number

    def crowding(self, one: str, least: str, length: int, skipped: int) -> float:
        """A match of less than half is dear where more is held than at the least loaded one, or at reluctant ones."""
        mine, others = (self.copies[name].tokens for name in (one, least))
        if 2 * skipped < length and self.reluctant([one]):
            return CROWDING * length
        return CROWDING * length * (mine - others) / mine if 2 * skipped < length and mine > others else 0.0

    def skipped(self, name: str, prompt: Prefix) -> int:
        copy, length = self.copies[name], len(prompt[1])
        run = blocks(prompt, copy.size)
        coming = {
            one
            for sent in self.sent.values()
            if sent.replica == name and not (copy.has_states and sent.is_prefilled)
            for one in blocks(sent.prompt, copy.size)
        }
        if copy.has_states:
            there = [len(one[1]) for one in run if one in copy.states | coming and len(one[1]) < length]
            return max(there, default=0)
        depth = next((i for i, one in enumerate(run) if one not in copy.held | coming), len(run))
        return min(depth * copy.size, length - 1)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), what=st.sampled_from(["first token", "tokens", "end"]), tokens=st.integers(1, 4))
    def go_on(self, data: st.DataObject, what: str, tokens: int) -> None:
        request = data.draw(st.sampled_from(sorted(self.sent)), "request")
        one = self.sent[request]
        if what == "first token":
            self.router.prefilled(request)
            one.to_compute, one.is_prefilled = 0, True
        elif what == "tokens":
            self.router.generated(request, tokens)
            one.to_generate -= min(tokens, one.to_generate)
        else:
            self.router.ended(request)
            del self.sent[request]

    @invariant()
    def knows_what_there_is(self) -> None:
        """RP-3: the router's state is exactly what the replicas hold and what is in flight."""
        if self.router is None:
            return
        self.router.check()
        assert self.router.members.keys() == self.copies.keys()
        for name, copy in self.copies.items():
            member = self.router.members[name]
            assert member.blocks.keys() == {self.name_of(name, one) for one in copy.held}
            assert member.states.keys() == {self.name_of(name, one) for one in copy.states}
            assert self.router.load(name) == self.load(name)
        for size, index in self.router._fleet.indexes.items():
            copies = [copy for copy in self.copies.values() if copy.size == size]
            assert len(index.stored) == len(set().union(*(copy.held for copy in copies)))
            flying = [blocks(one.prompt, size) for one in self.sent.values() if self.copies[one.replica].size == size]
            assert len(index.claimed) <= len({block for run in flying for block in run})

    def teardown(self) -> None:
        """Check that after the end only the replicas' contents are known, and without replicas nothing at all."""
        if self.router is None:
            return
        for request in list(self.sent):
            self.router.ended(request)
        self.sent.clear()
        self.knows_what_there_is()
        for index in self.router._fleet.indexes.values():
            assert not len(index.claimed)
            assert not index.claimed._again
        for name in list(self.copies):
            self.router.leave(name)
        assert (self.router._fleet.indexes, self.router.members) == ({}, {})


COMMON = {"deadline": None, "stateful_step_count": 40, "database": None}
RouterMachine.TestCase.settings = settings(max_examples=25, phases=[Phase.generate, Phase.shrink], **COMMON)
TestRouter = RouterMachine.TestCase


def keeps_blocks_that_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holders, "discard", lambda self, bit, keys: None)


def matches_blocks_behind_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "_deepest", lambda self, keys, end, replicas: end)


def takes_any_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = PrefixIndex._matched
    monkeypatch.setattr(PrefixIndex, "_resumable", lambda self, keys, end, bits: matched(self, keys[:end], bits))


def takes_the_most_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loads, "least", lambda self, bits: bits.bit_length() - 1)


@pytest.mark.parametrize(
    "plant",
    long_except(
        [matches_blocks_behind_a_hole],
        [keeps_blocks_that_are_removed, matches_blocks_behind_a_hole, takes_any_boundary, takes_the_most_loaded],
    ),
    ids=lambda plant: plant.__name__,
)
def test_the_machine_sees_planted_mistakes(plant, monkeypatch):
    """The comparison can fail."""
    plant(monkeypatch)
    assert_found(RouterMachine, ValueError)
