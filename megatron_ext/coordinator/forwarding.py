"""Request forwarding with retries on other replicas: no request is lost, and no client gets two answers.

A complete answer is passed on as a whole, a stream from its first event on. Until then, a replica that dies, is full or
fails costs the client only time. A stream that breaks off later ends with an error object.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from megatron_ext.config.fleet_limits import EVENT_BYTES
from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Member
from megatron_ext.coordinator.metrics import FleetMetrics
from megatron_ext.coordinator.outcome import Outcome
from megatron_ext.coordinator.proxied_request import ProxiedRequest
from megatron_ext.coordinator.replica_client import BadAnswer, CallFailed, CompleteAnswer, not_json
from megatron_ext.coordinator.retries import Retries
from megatron_ext.coordinator.routed_request import RoutedRequest
from megatron_ext.coordinator.weights.gate import Gate
from megatron_ext.coordinator.weights.sample_groups import SampleGroups, version_gone
from megatron_ext.routing.router import Decision, Reason
from megatron_ext.server.anthropic.error_envelope import error_event
from megatron_ext.server.api_errors import FAULT, ApiError

_END = b"\n\n"  # of a server-sent event
_GENERATED = re.compile(rb'"(?:completion|output)_tokens": ?(\d{1,18})')


@dataclass(frozen=True)
class Streamed:
    """Streamed answer, whose first part has arrived."""

    proxied: ProxiedRequest
    events: AsyncIterator[bytes]


class Forwarder:
    """Forwards requests to replicas; see the module.

    Args:
        fleet: All replicas.
        metrics: Metrics of the coordinator.
        prefix_index: Approximate prefix indexes of replicas without events, by their URLs.
        gate: Gate of requests while replicas get new weights.
    """

    def __init__(
        self, fleet: Fleet, metrics: FleetMetrics, prefix_index: dict[str, ApproximatePrefixIndex], gate: Gate
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._prefix_index = prefix_index
        self._gate = gate
        self._samples = SampleGroups()
        self._numbers = itertools.count()

    async def answer(self, routed: RoutedRequest, outcome: Outcome) -> CompleteAnswer | Streamed:
        """Run a request.

        Args:
            routed: Request to run.
            outcome: Updated with what becomes of the request.

        Raises:
            ApiError: No replica could answer, or none has the weights of the request's group of samples.
        """
        retries = Retries()
        while retries.may_go_on:
            await self._gate.admit(routed.group, self._samples.version(routed.samples), routed.owner)
            decision = self._choose(routed, retries)
            if decision is None:
                break
            proxied = self._begin(routed, decision)
            outcome.sent_to(decision.replica, decision.skipped)
            try:
                answer = await self._sent(routed, proxied, outcome)
            except BadAnswer as error:
                proxied.end()
                self._refuse(proxied.member, retries, error)
                continue
            except CallFailed as error:
                proxied.end()
                self._moved(proxied.member, "lost")
                self._fleet.note_silence(proxied.member, str(error))
                proxied.member.poked.set()
                retries.lost(proxied.member.url, error)
                continue
            except BaseException:
                proxied.end()
                raise
            if isinstance(answer, Streamed):
                proxied.has_answered = True
                return answer
            proxied.has_answered = answer.status == 200
            if not answer.is_json:
                proxied.end()
                self._refuse(proxied.member, retries, not_json(answer))
                continue
            outcome.read(answer.body)
            self._ended(routed, proxied, answer)
            if not retries.retry_elsewhere(proxied.member.url, answer):
                return answer
            self._moved(proxied.member, "full" if answer.status == 429 else "failed")
        return retries.verdict()

    def _refuse(self, member: Member, retries: Retries, error: BadAnswer) -> None:
        """Record an answer that cannot be passed on."""
        self._moved(member, "invalid")
        self._fleet.note_bad_answer(member, error)
        retries.answered_badly(member.url, error)

    def _moved(self, member: Member, reason: str) -> None:
        member.moved += 1
        self._metrics.moved(member.url, reason)

    def _choose(self, routed: RoutedRequest, retries: Retries) -> Decision | None:
        started = time.perf_counter()
        router, prompt = self._fleet.router, routed.prompt.prompt
        excluded = {*retries.excluded, *self._fleet.groups.outside(routed.group)}
        if routed.owner is not None:
            excluded |= self._fleet.members.keys() - {routed.owner}
        others, last = self._of_other_versions(routed)
        excluded |= others
        decision = router.route(prompt, {*excluded, *self._fleet.doubtful()})
        decision = decision or router.route(prompt, excluded)
        owner = routed.owner
        if decision is None and owner is not None and owner not in retries.excluded and self._fleet.is_known(owner):
            decision = Decision(owner, 0, 0, Reason.NOTHING_KNOWN)  # it drains, or is full, and no other can answer
        if decision is None and last is not None and last not in excluded:
            decision = Decision(last, 0, 0, Reason.NOTHING_KNOWN)
        if decision is not None:
            self._metrics.decided(decision, time.perf_counter() - started)
        return decision

    def _of_other_versions(self, routed: RoutedRequest) -> tuple[set[str], str | None]:
        """Return the replicas that do not have the weights of a group of samples, and one that loses them soon.

        Raises:
            ApiError: No replica has these weights any more.
        """
        version = self._samples.version(routed.samples)
        if version is None:
            return set(), None
        known = [member for member in self._fleet.members.values() if member.is_known]
        others = {member.url for member in known if member.version != version}
        if len(others) == len(known):
            raise version_gone(version)
        return others, next((one.url for one in known if one.url not in others and one.is_draining_for_update), None)

    def _begin(self, routed: RoutedRequest, decision: Decision) -> ProxiedRequest:
        return ProxiedRequest(self._fleet, decision, routed, next(self._numbers), self._samples)

    async def _sent(
        self, routed: RoutedRequest, proxied: ProxiedRequest, outcome: Outcome
    ) -> CompleteAnswer | Streamed:
        """Send the request; return the whole answer, or the beginning of a stream.

        Raises:
            CallFailed: The replica did not get this far.
        """
        call = proxied.call
        await call.start("POST", routed.path, routed.headers, routed.body, patience=self._fleet.timeout)
        is_stream = call.status == 200 and dict(call.headers).get(b"content-type", b"").startswith(b"text/event-stream")
        if not is_stream:
            return CompleteAnswer(call.status, call.headers, await call.body())
        events = whole_events(call.chunks(), EVENT_BYTES)
        first = await anext(events, None)
        if first is None:
            raise CallFailed("a stream without an event", has_reached=True)
        proxied.prefilled()
        return Streamed(proxied, self._rest(routed, proxied, outcome, first, events))

    async def _rest(
        self,
        routed: RoutedRequest,
        proxied: ProxiedRequest,
        outcome: Outcome,
        first: bytes,
        events: AsyncIterator[bytes],
    ) -> AsyncIterator[bytes]:
        """Yield all events; if the replica is lost on the way, the last event is the error."""
        count = first.count(_END)
        outcome.read(first)
        try:
            yield first
            async for some in events:
                outcome.read(some)
                yield some
                count += some.count(_END)
                proxied.generated(some.count(_END))
        except CallFailed as error:
            self._moved(proxied.member, "broken")
            if isinstance(error, BadAnswer):
                self._fleet.note_bad_answer(proxied.member, error)
            else:
                self._fleet.note_silence(proxied.member, str(error))
                proxied.member.poked.set()
            yield error_event(broken_off(error), routed.path)
        else:
            self._computed(routed, proxied)
            proxied.end(count)
        finally:
            proxied.end()

    def _ended(self, routed: RoutedRequest, proxied: ProxiedRequest, answer: CompleteAnswer) -> None:
        found = _GENERATED.search(answer.body) if answer.status == 200 else None
        if answer.status == 200:
            self._computed(routed, proxied)
        proxied.end(None if found is None else min(int(found[1]), routed.new_tokens))

    def _computed(self, routed: RoutedRequest, proxied: ProxiedRequest) -> None:
        """Add the prompt to the replica's approximate prefix index, if it has one."""
        member = proxied.member
        is_kept = member.is_known and member.version == proxied.version  # an update empties the cache
        if routed.prompt.is_shared and is_kept and member.url in self._prefix_index:
            self._prefix_index[member.url].answered(routed.prompt)


def broken_off(error: CallFailed) -> ApiError:
    """Return the error that ends a stream after its replica was lost."""
    return ApiError(503, f"the replica that answered was lost: {error}", kind=FAULT, code="replica_lost")


async def whole_events(chunks: AsyncIterator[bytes], limit: int = EVENT_BYTES) -> AsyncIterator[bytes]:
    """Yield whole server-sent events, one or several at once.

    Args:
        chunks: Parts of the stream.
        limit: Maximum size of an event in bytes.

    Raises:
        BadAnswer: An event is longer.
        CallFailed: The stream ends in the middle of an event.
    """
    rest = bytearray()
    async for chunk in chunks:
        start = max(0, len(rest) - len(_END) + 1)  # the end of an event may be cut
        rest += chunk
        end = rest.rfind(_END, start)
        if end >= 0:
            yield bytes(rest[: end + len(_END)])
            del rest[: end + len(_END)]
        if len(rest) > limit:
            raise BadAnswer(f"an event of the stream has more than {limit} bytes")
    if rest:
        raise CallFailed("the stream ended within an event", has_reached=True)
