"""Router of a fleet: replicas join and leave, report the contents of their caches, and get requests.

The caller passes names of replicas and requests, and the events of replicas (`docs/routing.md`); all quantities are in
tokens. Single-threaded: no call blocks, reads a clock, or fails because events of a replica are missing. A `KeyError`
means a replica that has not joined or a request that is not in flight: a mistake of the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.config.batching import DEFAULT_MAX_REQUESTS
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.routing.choosing import SCORED, Fleet, chooser
from megatron_ext.routing.index import PrefixIndex
from megatron_ext.routing.prompt import ExtraKeys, Prompt
from megatron_ext.routing.replica_state import Hash, InFlightRequest, Replica
from megatron_ext.routing.warming_replicas import WarmingReplicas


def check_router(fleet: Fleet, replicas: Mapping[str, Replica], in_flight: Mapping[Hashable, InFlightRequest]) -> None:
    """Assert that only joined replicas are indexed, and that loads and claims match the requests in flight."""
    assert sum(fleet.members.values()) == sum(one.bit for one in replicas.values()), (
        "a replica is in no index, or in two"
    )
    assert fleet.indexes.keys() == fleet.members.keys(), "an index without replicas"
    for index in fleet.indexes.values():
        index.check()
        replicas_of_index = sum(one.bit for one in replicas.values() if one.index is index)
        assert not index.having() & ~replicas_of_index, "an index entry of a replica that is not in it"
    for one in replicas.values():
        own = [sent for sent in in_flight.values() if sent.replica == one.name]
        assert len(own) == len(one.in_flight), f"requests in flight to {one.name}"
        own_load = sum(sent.tokens for sent in own)
        assert fleet.loads.load(one.number) == one.others + own_load, f"load of {one.name}"
        claimed = Counter(key for sent in own for key in sent.claimed)
        assert one.index.claimed.counts(one.bit) == claimed, f"claims of {one.name}"
        one.check()


_FIRST_GUESS = 256.0  # expected output tokens of a request before any has ended
_MEMORY = 64  # requests in the moving average of output tokens


@dataclass(frozen=True)
class Decision:
    """Routing decision for a request.

    Attributes:
        replica: Name of the replica.
        skipped: Tokens of the prompt that the replica is expected to skip.
    """

    replica: str
    skipped: int


@dataclass(frozen=True)
class ReplicaView:
    """Statistics of one replica: `load` is in tokens yet to be computed; blocks and states follow its events."""

    name: str
    in_flight: int
    load: int
    blocks: int
    states: int


class Router:
    """Router of requests to replicas; see the module for the contract.

    Args:
        settings: Policy, and its weight `alpha` of cached prefixes against load.
    """

    def __init__(self, settings: RoutingConfig | None = None) -> None:
        self._settings = settings or RoutingConfig()
        self._fleet = Fleet()
        self._choose = chooser(self._settings)
        self._replicas: dict[str, Replica] = {}
        self._in_flight: dict[Hashable, InFlightRequest] = {}
        self._mean_generated = _FIRST_GUESS
        self._warming = WarmingReplicas()
        self._retiring: frozenset[str] = frozenset()
        self._total_held = 0  # tokens
        self._sent = 0  # requests

    # Replicas

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
        if replica in self._replicas:
            raise ValueError(f"replica {replica!r} is already a member; remove it first")
        if min(block_size, slots) < 1:
            raise ValueError(f"block size {block_size} and slots {slots} must be positive")
        numbered = self._fleet.replicas
        number = next(number for number in range(len(numbered) + 1) if number not in numbered)
        index = self._fleet.indexes.setdefault(block_size, PrefixIndex(block_size))
        one = Replica(replica, number, index, has_states=has_states, slots=slots, capacity=blocks * block_size)
        self._replicas[replica] = numbered[number] = one
        self._fleet.loads.join(number)
        if self._total_held:
            self._warming.join(number)
        self._fleet.members[block_size] = self._fleet.members.get(block_size, 0) | one.bit

    def leave(self, replica: str) -> list[Hashable]:
        """Remove a replica, for any reason, with everything known of it.

        Returns:
            Requests that were in flight to the replica; the router has dropped them.
        """
        one = self._replicas[replica]
        lost = list(one.in_flight)
        for request in lost:
            self.ended(request)
        self.cleared(replica)
        index, size = one.index, one.index.block_size
        index.with_states &= ~one.bit
        self._fleet.members[size] &= ~one.bit
        if not self._fleet.members[size]:
            del self._fleet.members[size], self._fleet.indexes[size]
        self._fleet.loads.leave(one.number)
        self._warming.leave(one.number)
        del self._replicas[replica], self._fleet.replicas[one.number]
        self._note_reluctant()
        return lost

    def retire(self, replicas: Iterable[str]) -> None:
        """Start new conversations elsewhere than at these replicas, which are about to leave, and at no others' cost.

        Their own conversations still return to them. Replaces the replicas named before; unknown names are ignored.
        """
        self._retiring = frozenset(replicas)
        self._note_reluctant()

    def note_others(self, replica: str, requests: int, prompt_tokens: int, output_tokens: int) -> None:
        """Count the requests that a replica has from other routers as its load, in place of those noted before.

        Args:
            replica: Name of the replica.
            requests: Number of the requests; each is expected to generate as many tokens as the recent average.
            prompt_tokens: Prompt tokens of these requests that are yet to be computed.
            output_tokens: Maximum tokens that all of these requests generate.
        """
        one = self._replicas[replica]
        expected = min(output_tokens, requests * round(self._mean_generated))
        before, one.others, one.other_requests = one.others, prompt_tokens + expected, requests
        self._fleet.loads.shift(one.number, one.others - before)

    def replicas(self) -> list[ReplicaView]:
        """Return statistics of all joined replicas, in the order of joining."""
        load = self._fleet.loads.load
        return [
            ReplicaView(one.name, len(one.in_flight), load(one.number), one.blocks, one.states)
            for one in self._replicas.values()
        ]

    # Cache contents of replicas: their events, in order

    def stored(
        self,
        replica: str,
        hashes: Sequence[Hash],
        parent: Hash | None,
        token_ids: Iterable[int],
        extra_keys: ExtraKeys | None = None,
    ) -> bool:
        """Handle `BlockStored`: the replica holds a run of blocks.

        Args:
            replica: Name of the replica.
            hashes: The replica's hashes of the blocks, in order; some may be known already.
            parent: Hash of the block before the run; None at the start of a sequence.
            token_ids: Token ids of all blocks.
            extra_keys: Extra keys of the blocks besides their tokens, None for a block without: `[[salt], None, ...]`.

        Returns:
            Whether the parent is known. If not, events were lost, and the run is ignored.

        Raises:
            ValueError: The number of tokens does not match the blocks, or a token id is invalid.
        """
        one = self._replicas[replica]
        before = one.blocks
        is_known = one.stored(hashes, parent, token_ids, extra_keys)
        self._note_held(one, before)
        return is_known

    def removed(self, replica: str, hashes: Iterable[Hash]) -> None:
        """Handle `BlockRemoved`: blocks and the snapshots at their ends are gone; unknown hashes are ignored."""
        one = self._replicas[replica]
        before = one.blocks
        one.removed(hashes)
        self._note_held(one, before)

    def cleared(self, replica: str) -> None:
        """Handle `AllBlocksCleared`: the replica's cache is empty."""
        one = self._replicas[replica]
        before = one.blocks
        one.cleared()
        self._note_held(one, before)

    def state_stored(self, replica: str, hashes: Iterable[Hash]) -> bool:
        """Handle `StateStored`: requests can resume from snapshots at the ends of these blocks.

        Returns:
            Whether all of these blocks are known; see `stored`.
        """
        return self._replicas[replica].state_stored(hashes)

    def state_removed(self, replica: str, hashes: Iterable[Hash]) -> None:
        """Handle `StateRemoved`: the snapshots at the ends of these blocks are gone."""
        self._replicas[replica].state_removed(hashes)

    # Requests

    def prompt(self, tokens: Iterable[int], salt: str | None = None, *, is_cached: bool = True) -> Prompt:
        """Build a prompt to route, whose keys are computed once.

        Args:
            tokens: Token ids; kept without a copy if they are packed (`hash_chain.packed_tokens`).
            salt: Salt in its published form (`public_hash.event_salt`).
            is_cached: Whether the prompt uses caches; if not, load alone decides.

        Raises:
            ValueError: A token id is invalid, or the prompt is empty.
        """
        prompt = Prompt(tokens, salt, is_cached=is_cached)
        if not len(prompt):
            raise ValueError("a prompt has at least one token")
        return prompt

    def route(self, prompt: Prompt, exclude: Iterable[str] = ()) -> Decision | None:
        """Choose the replica for a prompt; call `began` once the request has been sent there.

        Args:
            prompt: Prompt from `prompt`.
            exclude: Names of replicas to avoid; unknown names are ignored.

        Returns:
            The decision; None if there is no other replica.
        """
        replicas = sum(self._fleet.members.values())
        for name in exclude:
            if name in self._replicas:
                replicas &= ~self._replicas[name].bit
        if not replicas:
            return None
        choice = self._choose(self._fleet, prompt, replicas)
        return Decision(self._fleet.replicas[choice.number].name, choice.skipped)

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
        one = self._replicas[decision.replica]
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
        self._fleet.loads.give(one.number, sent.tokens)
        self._warming.give(one.number, sent.to_compute, len(self._replicas), self._fleet.held, self._total_held)
        self._note_reluctant()

    def prefilled(self, request: Hashable) -> None:
        """Note that a request's first token has arrived, so its prompt is computed. Optional: `ended` suffices."""
        sent = self._in_flight[request]
        one = self._replicas[sent.replica]
        self._fleet.loads.take(one.number, sent.to_compute)
        sent.to_compute = 0
        if one.has_states:  # its prompt is complete: from now on events report its snapshots
            self.unclaim(request)

    def unclaim(self, request: Hashable) -> None:
        """Note that a request in flight will cache no more blocks than its replica has reported."""
        sent = self._in_flight[request]
        one = self._replicas[sent.replica]
        one.index.claimed.discard(one.bit, sent.claimed)
        sent.claimed = ()

    def computed(self, replica: str) -> None:
        """Note the requests in flight whose prompts are cached by now, and so computed. Optional, as `prefilled` is.

        For answers whose first token nothing tells of. Call it after events of the replica.
        """
        one = self._replicas[replica]
        for request in one.in_flight:
            sent = self._in_flight[request]
            if sent.to_compute and sent.last is not None and one.resumes_after(sent.last):
                self.prefilled(request)

    def generated(self, request: Hashable, tokens: int) -> None:
        """Note that `tokens` more tokens of a request have arrived. Optional."""
        sent = self._in_flight[request]
        fewer = min(tokens, sent.to_generate)
        sent.to_generate -= fewer
        self._fleet.loads.take(self._replicas[sent.replica].number, fewer)

    def ended(self, request: Hashable, generated: int | None = None) -> None:
        """Remove a request that has ended in any way.

        Args:
            request: Id of the request.
            generated: Generated tokens of a completed request, for the average; None if it did not complete.
        """
        sent = self._in_flight.pop(request)
        one = self._replicas[sent.replica]
        one.in_flight.discard(request)
        one.index.claimed.discard(one.bit, sent.claimed)
        self._fleet.loads.take(one.number, sent.tokens)
        if generated is not None:
            self._mean_generated += (generated - self._mean_generated) / _MEMORY

    def _note_held(self, one: Replica, blocks_before: int) -> None:
        self._total_held += (one.blocks - blocks_before) * one.index.block_size

    def _note_reluctant(self) -> None:
        retiring = sum(self._replicas[name].bit for name in self._retiring if name in self._replicas)
        self._fleet.reluctant = self._warming.sated | retiring

    def check(self) -> None:
        """Assert the invariants of the router; see `check_router`."""
        check_router(self._fleet, self._replicas, self._in_flight)
        held = sum(one.held for one in self._replicas.values())
        assert self._total_held == held, "tokens that all replicas hold"
