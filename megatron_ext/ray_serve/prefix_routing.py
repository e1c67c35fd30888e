"""Choice of a replica by its cached prefixes, for a request router of Ray Serve. Needs neither Ray nor torch.

What replicas cache is known from their reports (`cache_log.py`). What the router keeps of a replica is bounded: the
blocks and snapshots of its pools, and the requests in flight to it. A replica that contradicts itself is forgotten, and
read again from the start. Single-threaded, as `Router` is.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, StateRemoved, StateStored
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.prefix_cache.public_hash import event_salt
from megatron_ext.ray_serve.cache_log import CacheReport, LogPosition, ReplicaFacts
from megatron_ext.routing.choosing import Decision
from megatron_ext.routing.index import Hash, Replica
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router

_SLICE = 256  # blocks that are removed between two turns of the event loop


class KnownCache:
    """Contents of one cache of a replica, as far as its reports have been applied.

    A snapshot can be reported before its block or outlive it here: a report has all events of blocks first, then those
    of states. The router knows a snapshot while both it and its block are reported.

    Args:
        replica: Contents of all caches of the replica, in the router.
        rank: Rank of the cache in the replica's world; equal blocks of two caches have equal hashes.
        max_blocks: Blocks of the cache's pool.
    """

    def __init__(self, replica: Replica, rank: int, max_blocks: int) -> None:
        self._replica, self._rank, self._max_blocks = replica, rank, max_blocks
        self._blocks: dict[Hash, None] = {}  # each after its parent
        self._states: dict[Hash, None] = {}  # all reported snapshots, even if their block is unknown
        self.position = LogPosition()

    def apply(self, report: CacheReport) -> Iterator[None]:
        """Apply a report; yield where other tasks may run.

        Raises:
            ValueError: The report is not the next one, or contradicts earlier ones.
        """
        expected = LogPosition(self.position.log, self.position.number + len(report.events))
        if not report.is_whole and report.position != expected:
            raise ValueError(f"a report up to {report.position} after {self.position}")
        for event in report.events:
            yield from self.take(event)
            yield
        self.position = report.position

    def take(self, event: Event) -> Iterator[None]:
        """Apply an event; yield where other tasks may run.

        Raises:
            ValueError: The event cannot be one of this cache.
        """
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            self._remove(event.hashes)
        elif isinstance(event, StateStored):
            self._states.update(dict.fromkeys(event.hashes))
            self._check(len(self._states), "snapshots")
            self._replica.state_stored(self._tagged(one for one in event.hashes if one in self._blocks))
        elif isinstance(event, StateRemoved):
            self._remove_states(event.hashes)
        elif isinstance(event, AllBlocksCleared):
            yield from self._clear(self._blocks, self._remove)
        else:
            yield from self._clear(self._states, self._remove_states)

    def forget(self) -> None:
        """Forget the contents, so that the next report is to be the whole ones."""
        self.position = LogPosition()
        clearing = self._clear(self._blocks, self._remove), self._clear(self._states, self._remove_states)
        for _ in itertools.chain(*clearing):
            pass

    def _clear(self, known: dict[Hash, None], remove: Callable[[list[Hash]], None]) -> Iterator[None]:
        """Remove all blocks or snapshots, slice by slice, each block after its children."""
        while known:
            remove([known.popitem()[0] for _ in range(min(_SLICE, len(known)))])
            yield

    def _store(self, event: BlockStored) -> None:
        size = self._replica.index.block_size
        if event.block_size != size:
            raise ValueError(f"a block of {event.block_size} tokens in a cache with blocks of {size}")
        if event.parent is not None and event.parent not in self._blocks:
            raise ValueError("blocks after one that is not known")
        self._blocks.update(dict.fromkeys(event.hashes))
        self._check(len(self._blocks), "blocks")
        parent = None if event.parent is None else (self._rank, event.parent)
        self._replica.stored(self._tagged(event.hashes), parent, event.tokens, event.extra_keys)
        self._replica.state_stored(self._tagged(one for one in event.hashes if one in self._states))

    def _check(self, count: int, what: str) -> None:
        if count > self._max_blocks:
            raise ValueError(f"{count} {what} in a cache of {self._max_blocks} blocks")

    def _remove(self, hashes: Iterable[Hash]) -> None:
        for one in hashes:
            self._blocks.pop(one, None)
        self._replica.removed(self._tagged(hashes))

    def _remove_states(self, hashes: Iterable[Hash]) -> None:
        for one in hashes:
            self._states.pop(one, None)
        self._replica.state_removed(self._tagged(hashes))

    def _tagged(self, hashes: Iterable[Hash]) -> list[tuple[int, Hash]]:
        return [(self._rank, one) for one in hashes]


@dataclass
class _Member:
    facts: ReplicaFacts
    caches: list[KnownCache]


class PrefixRouting:
    """Router of the requests of one deployment; see the module.

    Args:
        settings: Policy and alpha.

    Attributes:
        faults: Number of reports that were refused.
    """

    def __init__(self, settings: RoutingConfig | None = None) -> None:
        self._router = Router(settings)
        self._members: dict[str, _Member] = {}
        self.faults = 0

    # Replicas

    def join(self, replica: str, facts: ReplicaFacts) -> None:
        """Add a replica, of whose caches nothing is known yet; a known one with equal facts stays as it is."""
        if replica in self._members:
            if self._members[replica].facts == facts:
                return
            self.leave(replica)
        blocks = facts.blocks * facts.caches
        self._router.join(replica, facts.block_size, has_states=facts.has_states, blocks=blocks)
        contents = self._router.members[replica]
        caches = [KnownCache(contents, rank, facts.blocks) for rank in range(facts.caches)]
        self._members[replica] = _Member(facts, caches)

    def leave(self, replica: str) -> None:
        """Forget a replica with its requests in flight; unknown ones are ignored."""
        if self._members.pop(replica, None) is not None:
            self._router.leave(replica)

    def owner(self, tag: str | None) -> str | None:
        """Return the replica whose ids of responses have a tag; None if it has not joined, or has left."""
        return next((name for name, member in self._members.items() if member.facts.tag == tag), None)

    def note_others(self, replica: str, requests: int, prompt_tokens: int, output_tokens: int) -> None:
        """Note a replica's load by other routers' requests, see `Router.note_others`; unknown replicas are ignored."""
        if replica in self._members:
            self._router.note_others(replica, requests, prompt_tokens, output_tokens)

    # Contents of caches

    def position(self, replica: str, rank: int = 0) -> LogPosition:
        """Return the position to ask a replica's cache for reports from.

        Raises:
            KeyError: The replica has not joined.
        """
        return self._members[replica].caches[rank].position

    def apply(self, replica: str, report: CacheReport, rank: int = 0) -> Iterator[None]:
        """Apply a report of a replica's cache; yield where other tasks may run, after which the replica may be gone.

        A report that contradicts earlier ones, or exceeds the cache's pool, counts as a fault: everything known of that
        cache is forgotten, and the next report is to be the whole contents.
        """
        member = self._members.get(replica)
        if member is None:
            return
        cache = member.caches[rank]
        try:
            for _ in cache.apply(report):
                yield
                if self._members.get(replica) is not member:
                    return
            if report.events:
                self._router.computed(replica)
        except ValueError:
            self.faults += 1
            cache.forget()

    # Requests

    def prompt(self, tokens: Iterable[int], salt: str | None = None) -> Prompt:
        """Return a prompt, whose blocks are hashed once.

        Args:
            tokens: Token ids; without any, the prompt is unknown, and load alone decides.
            salt: Salt of its keys, as the replica binds it.

        Raises:
            OverflowError: A token id is out of range.
        """
        known = packed_tokens(tokens)
        if not known:
            return Prompt((0,), event_salt(uuid.uuid4().hex))
        return Prompt(known, None if salt is None else event_salt(salt))

    def choose(self, prompt: Prompt, candidates: Iterable[str]) -> Decision | None:
        """Choose one of the candidates.

        Args:
            prompt: Prompt of the request.
            candidates: Names of replicas that may be chosen; names that have not joined are ignored.

        Returns:
            The decision; None if no candidate has joined.
        """
        allowed = frozenset(candidates)
        return self._router.route(prompt, [name for name in self._members if name not in allowed])

    def begin(self, request: Hashable, replica: str, prompt: Prompt, new_tokens: int) -> None:
        """Count a request as in flight to the replica that it was sent to, which may be another than the chosen one.

        Args:
            request: Id of the request, unique among those in flight; one that is in flight already moves here.
            replica: Name of the replica; of one that has not joined nothing is counted.
            prompt: Prompt of the request.
            new_tokens: Maximum number of generated tokens.
        """
        self.end(request)
        decision = self.choose(prompt, [replica])
        if decision is not None:
            self._router.began(request, decision, prompt, new_tokens)

    def prefilled(self, request: Hashable) -> None:
        """Note the first token of a request, whose prompt is no load any more; unknown requests are ignored."""
        with suppress(KeyError):
            self._router.prefilled(request)

    def end(self, request: Hashable) -> None:
        """Stop counting a request, however it ended; unknown ones are ignored."""
        with suppress(KeyError):
            self._router.ended(request)

    def check(self) -> None:
        """Assert the invariants of the router."""
        self._router.check()
        assert self._router.members.keys() == self._members.keys(), "members of the router"
