"""Router of a fleet: replicas join and leave, report the contents of their caches, and get requests.

The caller passes names of replicas and requests, and gives the events of a replica (`docs/routing.md`) to its member;
all quantities are in tokens. Single-threaded: no call blocks, reads a clock, or fails because events of a replica are
missing. A `KeyError` means a replica that has not joined or a request that is not in flight: a mistake of the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from megatron_ext.config.batching import DEFAULT_MAX_REQUESTS
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.choosing import SCORED, Decision, Fleet, chooser
from megatron_ext.routing.index import InFlightRequest, PrefixIndex, Replica
from megatron_ext.routing.prompt import Prompt

_FIRST_GUESS = 256.0  # expected output tokens of a request before any has ended
_MEMORY = 64  # requests in the moving average of output tokens


@dataclass
class _Given:
    """Prompt tokens to compute that were given since a warming replica joined: to itself, and to all replicas."""

    own: int = 0
    all: int = 0


class Router:
    """Router of requests to replicas; see the module for the contract.

    A replica that joins a fleet in use holds nothing. A rule that starts conversations where the least is held would
    start all of them there, each with a whole prompt to compute. So such a *warming* replica gets no more than its
    share of the prompt tokens of all, until it holds half as much as the replicas hold on average.

    Args:
        settings: Policy, and its weight `alpha` of cached prefixes against load.

    Attributes:
        members: Contents of the joined replicas by name, in the order of joining.
    """

    def __init__(self, settings: RoutingConfig | None = None) -> None:
        self._settings = settings or RoutingConfig()
        self._fleet = Fleet()
        self._choose = chooser(self._settings)
        self.members: dict[str, Replica] = {}
        self._in_flight: dict[Hashable, InFlightRequest] = {}
        self._mean_generated = _FIRST_GUESS
        self._warming: dict[str, _Given] = {}
        self._sated: set[str] = set()  # warming replicas that have had their share
        self._sent = 0  # requests

    def join(
        self,
        replica: str,
        block_size: int,
        *,
        has_states: bool = False,
        slots: int = DEFAULT_MAX_REQUESTS,
        blocks: int = 0,
    ) -> None:
        """Add a replica, which takes requests from now on and has no known cache contents.

        A restarted replica leaves and joins again.

        Args:
            replica: Unique name of the replica.
            block_size: Tokens of a block.
            has_states: Whether the model has recurrent layers: then it resumes only at snapshots, which it publishes.
            slots: Number of requests that the replica runs at once; Megatron's policies compare shares of it.
            blocks: Number of blocks that the replica has room for; 0 if that is not known.

        Raises:
            ValueError: The replica has joined already, or another number is not positive.
        """
        if replica in self.members:
            raise ValueError(f"replica {replica!r} is already a member; remove it first")
        if min(block_size, slots) < 1:
            raise ValueError(f"block size {block_size} and slots {slots} must be positive")
        if self._held():
            self._warming[replica] = _Given()
        numbered = self._fleet.replicas
        number = next(number for number in range(len(numbered) + 1) if number not in numbered)
        index = self._fleet.indexes.setdefault(block_size, PrefixIndex(block_size))
        one = Replica(replica, number, index, has_states=has_states, slots=slots, capacity=blocks * block_size)
        self.members[replica] = numbered[number] = one
        self._fleet.loads.join(number)

    def leave(self, replica: str) -> list[Hashable]:
        """Remove a replica, for any reason, with everything known of it.

        Returns:
            Requests that were in flight to the replica; the router has dropped them.
        """
        one = self.members[replica]
        lost = list(one.in_flight)
        for request in lost:
            self.ended(request)
        one.cleared()
        one.index.members &= ~one.bit
        one.index.with_states &= ~one.bit
        if not one.index.members:
            del self._fleet.indexes[one.index.block_size]
        self._fleet.loads.leave(one.number)
        del self.members[replica], self._fleet.replicas[one.number]
        self._warming.pop(replica, None)
        self._sated.discard(replica)
        self._note_reluctant()
        return lost

    def note_others(self, replica: str, requests: int, prompt_tokens: int, output_tokens: int) -> None:
        """Count the requests that a replica has from other routers as its load, in place of those noted before.

        Args:
            replica: Name of the replica.
            requests: Number of the requests; each is expected to generate as many tokens as the recent average.
            prompt_tokens: Prompt tokens of these requests that are yet to be computed.
            output_tokens: Maximum tokens that all of these requests generate.
        """
        one = self.members[replica]
        expected = min(output_tokens, requests * round(self._mean_generated))
        before, one.others, one.other_requests = one.others, prompt_tokens + expected, requests
        self._fleet.loads.shift(one.number, one.others - before)

    def load(self, replica: str) -> int:
        """Return the load of a replica: tokens yet to be computed."""
        return self._fleet.loads.load(self.members[replica].number)

    def route(self, prompt: Prompt, exclude: Iterable[str] = ()) -> Decision | None:
        """Choose the replica for a prompt; call `began` once the request has been sent there.

        Args:
            prompt: The prompt.
            exclude: Names of replicas to avoid; unknown names are ignored.

        Returns:
            The decision; None if there is no other replica.
        """
        replicas = sum(index.members for index in self._fleet.indexes.values())
        for name in exclude:
            if name in self.members:
                replicas &= ~self.members[name].bit
        return self._choose(self._fleet, prompt, replicas) if replicas else None

    def began(self, request: Hashable, decision: Decision, prompt: Prompt, new_tokens: int = 0) -> None:
        """Register a sent request: its tokens count as load, and its prompt's blocks as cached on the replica.

        Args:
            request: Id of the request, unique among those in flight.
            decision: Decision that was followed.
            prompt: Prompt of the request.
            new_tokens: Maximum tokens to generate; the expected number is the recent average, up to this maximum.

        Raises:
            ValueError: The request is in flight already.
        """
        if request in self._in_flight:
            raise ValueError(f"request {request!r} is in flight to {self._in_flight[request].replica!r}")
        one = self.members[decision.replica]
        keys = prompt.keys(one.index.block_size)
        expected = min(new_tokens, round(self._mean_generated))
        blocks = (len(prompt) - 1) // one.index.block_size
        last = keys[blocks - 1] if keys and blocks else None
        sent = InFlightRequest(one.name, keys, max(1, len(prompt) - decision.skipped), expected, last)
        self._in_flight[request] = sent
        one.in_flight.add(request)
        one.index.claimed.add(one.bit, keys)
        self._sent += 1
        if self._settings.policy in SCORED:
            one.note_assignment(keys, self._sent)
        self._fleet.loads.shift(one.number, sent.tokens, given=sent.tokens)
        self._note_given(one.name, sent.to_compute)

    def prefilled(self, request: Hashable) -> None:
        """Note that a request's first token has arrived, so its prompt is computed. Optional: `ended` suffices."""
        sent = self._in_flight[request]
        one = self.members[sent.replica]
        self._fleet.loads.shift(one.number, -sent.to_compute)
        sent.to_compute = 0
        if one.has_states:  # its prompt is complete: from now on events report its snapshots
            self.unclaim(request)

    def unclaim(self, request: Hashable) -> None:
        """Note that a request in flight will cache no more blocks than its replica has reported."""
        sent = self._in_flight[request]
        one = self.members[sent.replica]
        one.index.claimed.discard(one.bit, sent.claimed)
        sent.claimed = ()

    def computed(self, replica: str) -> None:
        """Note the requests in flight whose prompts are cached by now, and so computed. Optional, as `prefilled` is.

        For answers whose first token nothing tells of. Call it after events of the replica.
        """
        one = self.members[replica]
        for request in one.in_flight:
            sent = self._in_flight[request]
            if sent.to_compute and sent.last is not None and one.resumes_after(sent.last):
                self.prefilled(request)

    def generated(self, request: Hashable, tokens: int) -> None:
        """Note that `tokens` more tokens of a request have arrived. Optional."""
        sent = self._in_flight[request]
        fewer = min(tokens, sent.to_generate)
        sent.to_generate -= fewer
        self._fleet.loads.shift(self.members[sent.replica].number, -fewer)

    def ended(self, request: Hashable, generated: int | None = None) -> None:
        """Remove a request that has ended in any way.

        Args:
            request: Id of the request.
            generated: Generated tokens of a completed request, for the average; None if it did not complete.
        """
        sent = self._in_flight.pop(request)
        one = self.members[sent.replica]
        one.in_flight.discard(request)
        one.index.claimed.discard(one.bit, sent.claimed)
        self._fleet.loads.shift(one.number, -sent.tokens)
        if generated is not None:
            self._mean_generated += (generated - self._mean_generated) / _MEMORY

    def _held(self) -> int:
        """Return the tokens that all replicas hold, by their events."""
        return sum(one.held for one in self.members.values())

    def _note_given(self, replica: str, tokens: int) -> None:
        """Count prompt tokens that a replica has to compute in the shares of warming replicas."""
        if not self._warming:
            return
        total, replicas = self._held(), len(self.members)
        for name, given in list(self._warming.items()):
            given.all += tokens
            given.own += tokens if name == replica else 0
            if 2 * self.members[name].held * replicas >= total:  # its cache has grown
                del self._warming[name]
        self._sated = {name for name, given in self._warming.items() if given.own * replicas > given.all}
        self._note_reluctant()

    def _note_reluctant(self) -> None:
        self._fleet.reluctant = sum(one.bit for name, one in self.members.items() if name in self._sated)

    def check(self) -> None:
        """Assert that only joined replicas are indexed, and that loads and claims match the requests in flight."""
        fleet, members, in_flight = self._fleet, self.members.values(), self._in_flight.values()
        for index in fleet.indexes.values():
            assert index.members == sum(one.bit for one in members if one.index is index) > 0, "replicas of an index"
            index.check()
        for one in members:
            own = [sent for sent in in_flight if sent.replica == one.name]
            assert len(own) == len(one.in_flight), f"requests in flight to {one.name}"
            own_load = sum(sent.tokens for sent in own)
            assert self.load(one.name) == one.others + own_load, f"load of {one.name}"
            claimed = Counter(key for sent in own for key in sent.claimed)
            assert one.index.claimed.counts(one.bit) == claimed, f"claims of {one.name}"
            one.check()
