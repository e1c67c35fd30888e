"""Choice of the replica of each request, where several replicas of one world step together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.routing.index import Replica
from megatron_ext.routing.prompt import Prompt
from megatron_ext.routing.router import Router
from megatron_ext.scheduling.accounting import general_reason
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler

# Generated tokens in the load of a prompt token: they are computed one a step beside others, and delay a prompt less.
_GENERATED = 4


@dataclass
class _InFlightRequest:
    """Request that the router counts, and how much of it the router knows."""

    request: Request
    replica: int
    generated: int = 0  # in units of `_GENERATED` tokens
    is_prefilled: bool = False


class ReplicaChoice:
    """Choice of the replica of each request, by a router that follows every cache.

    All replicas are planned in this process, so the router knows what each cache holds at every moment, and which
    prompts will be in it once they are computed.

    Args:
        schedulers: Scheduler of each replica, without requests.
        settings: Policy.
    """

    def __init__(self, schedulers: Sequence[Scheduler], settings: RoutingConfig) -> None:
        self._router = Router(settings)
        self._names = [str(replica) for replica in range(len(schedulers))]
        self._is_caching = schedulers[0].cache.is_enabled
        self._keeps_log_probs = schedulers[0].limits.keeps_log_probs
        self._in_flight: dict[int, _InFlightRequest] = {}  # by request id
        self._is_outdated = False  # steps were computed since the router was told of tokens
        for replica, scheduler in enumerate(schedulers):
            limits, cache = scheduler.limits, scheduler.cache
            self._router.join(
                self._names[replica],
                limits.block_size,
                has_states=cache.states is not None,
                slots=limits.max_requests,
                blocks=limits.total_blocks,
            )
            if cache.is_enabled:
                cache.observers.append(_CacheFollower(self, self._router.members[self._names[replica]]))

    def choose(self, request: Request, replica: int | None = None) -> int:
        """Choose the replica of a request, which counts as its load until `ended`.

        Args:
            request: Request that no replica has yet.
            replica: The replica, if it is given and not to be chosen.
        """
        self._update()
        router, params, tokens = self._router, request.params, request.tokens
        keeps = self._keeps_log_probs
        is_read = general_reason(params, is_caching=self._is_caching, keeps_log_probs=keeps) is None
        prompt = Prompt(tokens, params.cache_salt, is_cached=is_read)
        others = [] if replica is None else [name for name in self._names if name != self._names[replica]]
        decision = router.route(prompt, others)
        assert decision is not None, "replicas of a world take every request"
        is_stored = self._is_caching and params.enable_prefix_caching
        if is_stored and not is_read:
            prompt = Prompt(tokens, params.cache_salt)
        router.began(request.request_id, decision, prompt, -(-params.num_tokens_to_generate // _GENERATED))
        chosen = self._names.index(decision.replica)
        self._in_flight[request.request_id] = _InFlightRequest(request, chosen)
        return chosen

    def note_step(self) -> None:
        """Note that tokens were computed."""
        self._is_outdated = True

    def ended(self, requests: Iterable[Request]) -> None:
        """Note that requests have ended in any way; requests without a chosen replica are ignored."""
        for request in requests:
            if self._in_flight.pop(request.request_id, None) is not None:
                is_complete = request.status is Status.COMPLETED
                generated = -(-request.generated_count // _GENERATED)
                self._router.ended(request.request_id, generated if is_complete else None)

    def note_cleared(self, replica: str) -> None:
        """Note that a cache is empty: requests that are being computed publish nothing any more, waiting ones will."""
        for request_id, sent in self._in_flight.items():
            if self._names[sent.replica] == replica and sent.request.block_table:
                self._router.unclaim(request_id)

    def _update(self) -> None:
        """Tell the router of the tokens computed since the last request; once for all requests between two steps."""
        if not self._is_outdated:
            return
        self._is_outdated = False
        for request_id, sent in self._in_flight.items():
            count = sent.request.generated_count // _GENERATED
            if count > sent.generated:
                self._router.generated(request_id, count - sent.generated)
                sent.generated = count
            if not sent.is_prefilled and sent.request.computed_end >= sent.request.prompt_length:
                self._router.prefilled(request_id)
                sent.is_prefilled = True

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that the router counts these requests, which have not ended, and that its invariants hold."""
        self._router.check()
        assert self._in_flight.keys() >= {request.request_id for request in requests}, "requests of the router"


class _CacheFollower:
    """Observer of one replica's cache that passes its contents on; see `CacheObserver`."""

    def __init__(self, choice: ReplicaChoice, replica: Replica) -> None:
        self._choice, self._replica = choice, replica

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Add blocks."""
        tokens = run.tokens[run.end - len(run.block_hashes) * run.block_size : run.end]
        extras = [[run.salt]] if run.parent is None and run.salt is not None else None
        self._replica.stored(run.block_hashes, run.parent, tokens, extras)

    def on_blocks_removed(self, block_hashes: Iterable[BlockHash]) -> None:
        """Remove blocks."""
        self._replica.removed(block_hashes)

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Add a snapshot."""
        self._replica.state_stored([block_hash])

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Remove a snapshot."""
        self._replica.state_removed([block_hash])

    def on_cleared(self) -> None:
        """Remove everything."""
        self._replica.cleared()
        self._choice.note_cleared(self._replica.name)
