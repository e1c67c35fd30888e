"""Request in flight to a replica: an HTTP call, and the updates of the router."""

from __future__ import annotations

from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.replica_client import Call
from megatron_ext.coordinator.routed_request import RoutedRequest
from megatron_ext.coordinator.weights.sample_groups import SampleGroups
from megatron_ext.routing.router import Decision


class ProxiedRequest:
    """Request in flight to a replica.

    Args:
        fleet: Fleet of the replica.
        decision: Routing decision.
        routed: Request to be computed.
        number: Unique number of the request.
        samples: Groups of samples.

    Attributes:
        member: The replica.
        version: Version of the replica's weights at the start.
        call: Call to the replica.
        has_answered: Whether an answer of the replica has been passed on.
    """

    def __init__(
        self, fleet: Fleet, decision: Decision, routed: RoutedRequest, number: int, samples: SampleGroups
    ) -> None:
        fleet.router.began(number, decision, routed.prompt.prompt, routed.new_tokens)
        fleet.in_flight.add(number)
        self._fleet = fleet
        self._number = number
        self.member = member = fleet.members[decision.replica]
        self.version = member.version
        self.call = Call(member.address)
        self.has_answered = False
        self._samples, self._samples_name = samples, routed.samples
        if routed.samples is not None and self.version is not None:
            samples.began(routed.samples, self.version)
        self._is_over = False
        member.calls.add(self.call)
        member.sent += 1

    @property
    def _is_routed(self) -> bool:
        """True if the router has the request; it is removed when its replica leaves."""
        return self._number in self._fleet.in_flight

    def prefilled(self) -> None:
        """Record the first token."""
        if self._is_routed:
            self._fleet.router.prefilled(self._number)

    def generated(self, tokens: int) -> None:
        """Record more generated tokens."""
        if self._is_routed:
            self._fleet.router.generated(self._number, tokens)

    def end(self, generated: int | None = None) -> None:
        """Record the end, successful or not; later calls have no effect."""
        if self._is_over:
            return
        self._is_over = True
        if self._is_routed:
            self._fleet.in_flight.discard(self._number)
            self._fleet.router.ended(self._number, generated)
        if self._samples_name is not None and self.version is not None:
            self._samples.ended(self._samples_name, has_answered=self.has_answered)
        self.call.close()
        self.member.calls.discard(self.call)
        self._fleet.ended(self.member)

    def abort(self) -> None:
        """Abort the request, whose client has disconnected."""
        self.end()
