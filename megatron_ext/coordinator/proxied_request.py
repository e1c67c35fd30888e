"""A request in flight to a replica: a call, and what the router is told of it."""

from __future__ import annotations

from megatron_ext.coordinator.fleet import Fleet
from megatron_ext.coordinator.replica_client import Call
from megatron_ext.coordinator.routed_request import RoutedRequest
from megatron_ext.routing.router import Decision


class ProxiedRequest:
    """A request in flight to a replica.

    Args:
        fleet: That the replica is of.
        decision: Which replica.
        asked: What is to be computed.
        number: Its name, which no other one has.
    """

    def __init__(self, fleet: Fleet, decision: Decision, routed: RoutedRequest, number: int) -> None:
        fleet.router.began(number, decision, routed.prompt.prompt, routed.new_tokens)
        fleet.in_flight.add(number)
        self._fleet = fleet
        self._number = number
        self.member = member = fleet.members[decision.replica]
        self.call = Call(member.address)
        self._is_over = False
        member.calls.add(self.call)
        member.sent += 1

    @property
    def _is_routed(self) -> bool:
        """Whether the router has it: one whose replica has left is not in flight to it any more."""
        return self._number in self._fleet.in_flight

    def prefilled(self) -> None:
        """Its first token has come."""
        if self._is_routed:
            self._fleet.router.prefilled(self._number)

    def generated(self, tokens: int) -> None:
        """So many more have come."""
        if self._is_routed:
            self._fleet.router.generated(self._number, tokens)

    def end(self, generated: int | None = None) -> None:
        """However it has ended; once is enough."""
        if self._is_over:
            return
        self._is_over = True
        if self._is_routed:
            self._fleet.in_flight.discard(self._number)
            self._fleet.router.ended(self._number, generated)
        self.call.close()
        self.member.calls.discard(self.call)
        self._fleet.ended(self.member)

    def abort(self) -> None:
        """Nobody waits for the answer any more."""
        self.end()
