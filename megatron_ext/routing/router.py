"""The one object that others talk to: replicas join and leave, say what they hold, and get requests.

Who calls it gives names of replicas and of requests, and what replicas publish (`docs/fleet.md`); everything is in
tokens. One thread; nothing here waits, asks for the time or raises for what a replica has not told. `KeyError` is for
replicas that have not joined and requests that are not in flight: the caller's mistakes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.config.routing import RoutingConfig, RoutingPolicyName
from megatron_ext.routing.choosing import Choice, Fleet, chooser
from megatron_ext.routing.index import PrefixIndex
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.replica import Flight, Hash, Replica


def check_router(fleet: Fleet, replicas: Mapping[str, Replica], flights: Mapping[Hashable, Flight]) -> None:
    """Assert that nothing is known of who is not there, and that loads and claims are those of the flights."""
    assert fleet.open == sum(one.bit for one in replicas.values() if one.is_open), "who is open"
    assert sum(fleet.members.values()) == sum(one.bit for one in replicas.values()), "somebody is in no index, or twice"
    assert fleet.indexes.keys() == fleet.members.keys(), "an index of nobody"
    for index in fleet.indexes.values():
        index.check()
        there = sum(one.bit for one in replicas.values() if one.index is index)
        assert not index.having() & ~there, "something is known of who is not there"
    for one in replicas.values():
        mine = [flight for flight in flights.values() if flight.replica == one.name]
        assert len(mine) == len(one.in_flight), f"requests in flight to {one.name}"
        assert fleet.loads.load(one.number) == sum(flight.tokens for flight in mine), f"load of {one.name}"
        claimed = Counter(key for flight in mine for key in flight.claimed)
        assert one.index.claimed.counts(one.bit) == claimed, f"claims of {one.name}"
        one.check()


_FIRST_GUESS = 256.0  # tokens that a request generates, before any has ended
_MEMORY = 64  # requests that the mean of generated tokens remembers


class Reason(str, enum.Enum):
    """Why a request goes where it goes."""

    PREFIX = "prefix"  # the most is skipped there
    LOAD = "load"  # the least is to be computed there; it may skip something, but another would have skipped more
    NOTHING_KNOWN = "nothing_known"  # nobody has any of it: the least loaded one
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True)
class Decision:
    """Where a request is to run.

    Attributes:
        replica: Its name.
        skipped: Tokens of the prompt that it is expected to skip.
        max_skipped: The most that any replica that is open was expected to skip, where the policy looked at that.
        reason: Why.
    """

    replica: str
    skipped: int
    max_skipped: int
    reason: Reason


@dataclass(frozen=True)
class ReplicaView:
    """One replica in numbers: tokens of `load` are yet to be computed; blocks and states are what its events say."""

    name: str
    is_draining: bool
    is_open: bool
    in_flight: int
    load: int
    blocks: int
    states: int


class Router:
    """See the module.

    Args:
        settings: Policy and alpha.
    """

    def __init__(self, settings: RoutingConfig | None = None) -> None:
        self._settings = settings or RoutingConfig()
        self._fleet = Fleet(held=self._held)
        self._choose = chooser(self._settings)
        self._replicas: dict[str, Replica] = {}
        self._names: dict[int, str] = {}  # by number of the bit
        self._flights: dict[Hashable, Flight] = {}
        self._mean_generated = _FIRST_GUESS

    def _held(self, number: int) -> int:
        one = self._replicas[self._names[number]]
        return one.blocks * one.index.block_size

    # Replicas

    def join(self, replica: str, block_size: int, *, has_states: bool = False, max_requests: int | None = None) -> None:
        """A replica takes requests from now on; nothing is known of what it holds.

        One that is restarted leaves and joins again.

        Args:
            replica: Its name, which no other one has.
            block_size: Tokens.
            has_states: Whether it has recurrent layers: then it resumes at snapshots only, which it publishes.
            max_requests: That may be in flight to it; None without a limit.

        Raises:
            ValueError: It is there already, or a number is not positive.
        """
        if replica in self._replicas:
            raise ValueError(f"replica {replica!r} is there already; it has to leave first")
        if block_size < 1 or (max_requests is not None and max_requests < 1):
            raise ValueError(f"block size {block_size} and most requests {max_requests} must be positive")
        number = next(number for number in range(len(self._names) + 1) if number not in self._names)
        index = self._fleet.indexes.setdefault(block_size, PrefixIndex(block_size))
        one = Replica(replica, number, index, has_states=has_states, max_requests=max_requests)
        self._replicas[replica], self._names[number] = one, replica
        self._fleet.loads.join(number)
        self._fleet.members[block_size] = self._fleet.members.get(block_size, 0) | one.bit
        self._note_open(one)

    def leave(self, replica: str) -> list[Hashable]:
        """A replica is gone, for whatever reason: all that is known of it is forgotten.

        Returns:
            Requests that were in flight to it; they are not any more.
        """
        one = self._replicas[replica]
        lost = list(one.in_flight)
        for request in lost:
            self.ended(request)
        one.cleared()
        index, size = one.index, one.index.block_size
        index.with_states &= ~one.bit
        self._fleet.members[size] &= ~one.bit
        if not self._fleet.members[size]:
            del self._fleet.members[size], self._fleet.indexes[size]
        self._fleet.loads.leave(one.number)
        self._fleet.open &= ~one.bit
        del self._replicas[replica], self._names[one.number]
        return lost

    def drain(self, replica: str, *, is_draining: bool = True) -> None:
        """Send it nothing more; what is in flight stays, and its events count. Or take that back."""
        self._replicas[replica].is_draining = is_draining
        self._note_open(self._replicas[replica])

    def replicas(self) -> list[ReplicaView]:
        """All that have joined, in the order in which they did."""
        load = self._fleet.loads.load
        return [
            ReplicaView(
                one.name, one.is_draining, one.is_open, len(one.in_flight), load(one.number), one.blocks, one.states
            )
            for one in self._replicas.values()
        ]

    # What replicas hold: their events, in order

    def stored(
        self,
        replica: str,
        hashes: Sequence[Hash],
        parent: Hash | None,
        token_ids: Iterable[int],
        extra_keys: Iterable[object] | None = None,
    ) -> bool:
        """`BlockStored`: the replica holds a run of blocks.

        Args:
            replica: Its name.
            hashes: What it calls them, in order; known ones may be among them.
            parent: The block that the run continues; None at the start of a sequence.
            token_ids: Of all of them.
            extra_keys: What they depend on beside the tokens, for each block or None: `[[salt], None, ...]`.

        Returns:
            Whether the parent is known. If not, events were lost, the run is left out, and the replica should be asked
            to replay its state.

        Raises:
            ValueError: Not as many tokens as the blocks have, or one is no token id.
        """
        return self._replicas[replica].stored(hashes, parent, token_ids, extra_keys)

    def removed(self, replica: str, hashes: Iterable[Hash]) -> None:
        """`BlockRemoved`: these are gone, and snapshots at their ends with them; unknown ones are left out."""
        self._replicas[replica].removed(hashes)

    def cleared(self, replica: str) -> None:
        """`AllBlocksCleared`: it holds nothing."""
        self._replicas[replica].cleared()

    def state_stored(self, replica: str, hashes: Iterable[Hash]) -> bool:
        """`StateStored`: snapshots at the ends of these blocks can be resumed from.

        Returns:
            Whether all of these blocks are known; see `stored`.
        """
        return self._replicas[replica].state_stored(hashes)

    def state_removed(self, replica: str, hashes: Iterable[Hash]) -> None:
        """`StateRemoved`: they cannot any more."""
        self._replicas[replica].state_removed(hashes)

    # Requests

    def prompt(self, tokens: Iterable[int], salt: str | None = None) -> Prompt:
        """A prompt to be routed, whose keys are made once.

        Args:
            tokens: Ids; kept without a copy if they are packed (`hash_chain.packed_tokens`).
            salt: As the replicas publish it (`shown.event_salt`).

        Raises:
            ValueError: One is no token id, or there is none.
        """
        prompt = Prompt(tokens, salt)
        if not len(prompt):
            raise ValueError("a prompt has at least one token")
        return prompt

    def route(self, prompt: Prompt, exclude: Iterable[str] = ()) -> Decision | None:
        """Where to run it; tell `began` when it has been sent there.

        Args:
            prompt: See `prompt`.
            exclude: Names of replicas that it is not to go to; unknown ones are left out.

        Returns:
            None if every other replica is full, draining or gone.
        """
        replicas = self._fleet.open
        for name in exclude:
            if name in self._replicas:
                replicas &= ~self._replicas[name].bit
        if not replicas:
            return None
        choice = self._choose(self._fleet, prompt, replicas)
        return Decision(self._names[choice.number], choice.skipped, choice.max_skipped, self._reason(choice))

    def _reason(self, choice: Choice) -> Reason:
        if self._settings.policy == RoutingPolicyName.ROUND_ROBIN.value:
            return Reason.ROUND_ROBIN
        if self._settings.policy == RoutingPolicyName.LOAD_BALANCED.value:
            return Reason.LOAD
        if not choice.max_skipped:
            return Reason.NOTHING_KNOWN
        return Reason.PREFIX if choice.skipped >= choice.max_skipped else Reason.LOAD

    def began(self, request: Hashable, decision: Decision, prompt: Prompt, new_tokens: int = 0) -> None:
        """A request has been sent: its tokens are load, and its prompt's blocks are to be there.

        Args:
            request: Its name, which none in flight has.
            decision: Where it went.
            prompt: Its.
            new_tokens: That it may generate. It is expected to generate as many as others did on average, if it may.

        Raises:
            ValueError: It is in flight.
        """
        if request in self._flights:
            raise ValueError(f"request {request!r} is in flight to {self._flights[request].replica!r}")
        one = self._replicas[decision.replica]
        keys = prompt.keys(one.index.block_size)
        expected = min(new_tokens, round(self._mean_generated))
        flight = Flight(one.name, keys, max(1, len(prompt) - decision.skipped), expected)
        self._flights[request] = flight
        one.in_flight.add(request)
        one.index.claimed.add(one.bit, keys)
        self._fleet.loads.give(one.number, flight.tokens)
        self._note_open(one)

    def prefilled(self, request: Hashable) -> None:
        """Its first token has come, so its prompt is computed. Optional: `ended` counts it all the same."""
        flight = self._flights[request]
        one = self._replicas[flight.replica]
        self._fleet.loads.take(one.number, flight.to_compute)
        flight.to_compute = 0
        if one.has_states:  # its boundaries are behind it: from now on events say where it left a state
            one.index.claimed.discard(one.bit, flight.claimed)
            flight.claimed = ()

    def generated(self, request: Hashable, tokens: int) -> None:
        """So many tokens more have come. Optional."""
        flight = self._flights[request]
        fewer = min(tokens, flight.to_generate)
        flight.to_generate -= fewer
        self._fleet.loads.take(self._replicas[flight.replica].number, fewer)

    def ended(self, request: Hashable, generated: int | None = None) -> None:
        """It is not in flight any more, however it ended.

        Args:
            request: Its name.
            generated: Tokens that it generated, if it came to its end: what others are expected to.
        """
        flight = self._flights.pop(request)
        one = self._replicas[flight.replica]
        one.in_flight.discard(request)
        one.index.claimed.discard(one.bit, flight.claimed)
        self._fleet.loads.take(one.number, flight.tokens)
        self._note_open(one)
        if generated is not None:
            self._mean_generated += (generated - self._mean_generated) / _MEMORY

    def least_load(self) -> int:
        """Tokens yet to be computed where the fewest are; for the wait when all are full. 0 without replicas."""
        return self._fleet.loads.lowest()

    def _note_open(self, one: Replica) -> None:
        self._fleet.open = self._fleet.open | one.bit if one.is_open else self._fleet.open & ~one.bit

    def check(self) -> None:
        """Assert that nothing is known of who is not there, and that loads and claims are those of the flights."""
        check_router(self._fleet, self._replicas, self._flights)
