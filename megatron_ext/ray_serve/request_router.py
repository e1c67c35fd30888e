"""Adapter of the router to Ray Serve's request-router interface, which is alpha.

All that this package uses of that interface is here. Tried with Ray 2.60.0. Of Ray's private names it uses
`RequestMetadata`, to call a method of one given replica, which the public interface has no way for.

Ray pickles the classes and variables of this module by value, in the process that deploys. So what differs from process
to process is read from another module.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from typing import Any

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from megatron_ext.config.routing import RoutingConfig
from megatron_ext.ray_serve import forwarded as this_process
from megatron_ext.ray_serve.cache_log import CacheReport, LogPosition, ReplicaFacts
from megatron_ext.ray_serve.forwarded import ForwardedRequest, PromptRequest
from megatron_ext.ray_serve.prefix_routing import PrefixRouting
from megatron_ext.routing.prompt import Prompt

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds that a replica waits for an event before it answers; as long, it may not seem to be idle
FIRST_REST, LONGEST_REST = 0.1, 10.0  # seconds after a failed call; doubled each time
_MAX_PROMPTS = 1024  # requests between choice and sending


class PrefixRequestRouter(RequestRouter):
    """Router of one handle of the replicas: prefers replicas that cache a prompt's prefix, see `PrefixRouting`."""

    def initialize_state(self, policy: str = "least_computed", alpha: float = 0.5) -> None:
        """Take `request_router_kwargs`, the fields of `RoutingConfig`."""
        self._routing = PrefixRouting(RoutingConfig(policy, alpha))
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()  # by internal request id

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the set of replicas: read the caches of new ones, and forget replicas that are gone."""
        super().update_replicas(replicas)
        by_name = {_name(one.replica_id): one for one in replicas}
        for name in set(self._readers) - set(by_name):
            self._forget(name)
        for name, one in by_name.items():
            if name not in self._readers:
                try:
                    facts = ReplicaFacts.of(one.replica_metadata)
                    self._routing.join(name, facts)
                except ValueError as error:
                    logger.error("replica %s gets requests by load only: %s", name, error)
                    continue
                self._readers[name] = asyncio.get_running_loop().create_task(self._read_all(name, one, facts.caches))
                self._watchers[name] = asyncio.get_running_loop().create_task(self._watch(name, one))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has died."""
        super().on_replica_actor_died(replica_id)
        self._forget(_name(replica_id))

    def _forget(self, name: str) -> None:
        self._routing.leave(name)
        for tasks in (self._readers, self._watchers):
            if name in tasks:
                tasks.pop(name).cancel()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the preferred replica, and then all others, for the case that it is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all of them are full
        by_name = {_name(one.replica_id): one for one in candidate_replicas}
        asked = _argument(pending_request)
        tag = asked.owner if isinstance(asked, ForwardedRequest | PromptRequest) else None
        owner = None if tag is None else self._routing.owner(tag)
        if owner is not None and owner in by_name:
            return [[by_name[owner]]]  # no other one has what the request continues
        decision = self._routing.choose(self._prompt(pending_request), by_name)
        if decision is None:
            return [candidate_replicas]
        best = by_name.pop(decision.replica)
        return [[best], list(by_name.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Count a request as in flight to the replica that has accepted it."""
        prompt = self._prompt(pending_request)
        request = pending_request.metadata.internal_request_id
        self._prompts.pop(request, None)
        if (forwarded := _forwarded(pending_request)) is not None and forwarded.prompt is not None:
            self._routing.begin(request, _name(replica_id), prompt, forwarded.prompt.new_tokens)
            loop = asyncio.get_running_loop()
            forwarded.first_token.listen(lambda: loop.call_soon_threadsafe(self._routing.prefilled, request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request as in flight, however it ended."""
        self._routing.end(internal_request_id)

    def _prompt(self, pending: PendingRequest) -> Prompt:
        """Return the prompt of a request, hashed once."""
        request = pending.metadata.internal_request_id
        if request not in self._prompts:
            forwarded = _forwarded(pending)
            read = None if forwarded is None else forwarded.prompt
            if read is None or not read.tokens:
                prompt = self._routing.prompt(())
            else:  # a prompt that is not shared has keys of its own
                prompt = self._routing.prompt(read.tokens[0], read.salt if read.is_shared else uuid.uuid4().hex)
            self._prompts[request] = prompt
            while len(self._prompts) > _MAX_PROMPTS:  # requests that were cancelled before they were sent
                self._prompts.popitem(last=False)
        return self._prompts[request]

    async def _read_all(self, name: str, replica: RunningReplica, caches: int) -> None:
        """Read the events of all caches of a replica until it is gone."""
        await asyncio.gather(*(self._read(name, replica, cache) for cache in range(caches)))

    async def _read(self, name: str, replica: RunningReplica, cache: int) -> None:
        """Read the events of one cache."""
        rest = FIRST_REST
        while True:
            try:
                report = await self._report(replica, self._routing.position(name, cache), cache)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the replica's or Ray's: a replica that is gone leaves, another is asked again
                logger.warning("replica %s does not report its cache: %s", name, " ".join(str(error).split())[:500])
                await asyncio.sleep(rest)
                rest = min(2 * rest, LONGEST_REST)
                continue
            rest = FIRST_REST
            faults = self._routing.faults
            for _ in self._routing.apply(name, report, cache):
                await asyncio.sleep(0)
            if self._routing.faults > faults:
                logger.warning("replica %s contradicts itself; its cache is read again", name)
                await asyncio.sleep(LONGEST_REST)

    async def _watch(self, name: str, replica: RunningReplica) -> None:
        """Ask a replica for the load by others until it is gone: once a second, and when their requests have ended."""
        rest, patience = PATIENCE, 0.0
        while True:
            await asyncio.sleep(rest)
            try:
                others: tuple[int, int, int] = await self._call(replica, "load_report", this_process.SENDER, patience)
                self._routing.note_others(name, *others)
                has_others = others[0] > 0
                rest, patience = (0.0, PATIENCE) if has_others else (PATIENCE, 0.0)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # as in `_read`
                logger.warning("replica %s does not report its load: %s", name, " ".join(str(error).split())[:500])
                rest = LONGEST_REST

    async def _report(self, replica: RunningReplica, position: LogPosition, cache: int) -> CacheReport:
        report: CacheReport = await self._call(replica, "cache_report", position, PATIENCE, cache)
        return report

    async def _call(self, replica: RunningReplica, method: str, *arguments: object) -> Any:
        """Call a method of one replica; Ray counts the call as a request of the replica until it returns."""
        number = uuid.uuid4().hex
        metadata = RequestMetadata(number, number, call_method=method, app_name=self.app_name)
        result = replica.try_send_request(PendingRequest(list(arguments), {}, metadata), with_rejection=False)
        try:
            return await result.get_async()
        except asyncio.CancelledError:
            result.cancel()
            raise


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.to_full_id_str()
    return name


def _forwarded(pending: PendingRequest) -> ForwardedRequest | None:
    """Return the request that an ingress forwards; None for other calls."""
    given = _argument(pending)
    return given if isinstance(given, ForwardedRequest) else None


def _argument(pending: PendingRequest) -> object:
    return pending.args[0] if pending.args else None
