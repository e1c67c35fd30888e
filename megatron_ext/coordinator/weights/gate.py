"""Gate of requests: they wait while the replicas that could run them get new weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Member, Status
from megatron_ext.coordinator.membership.versions import Version
from megatron_ext.coordinator.supervision import within
from megatron_ext.server.api_errors import FAULT, ApiError

USUAL_WAIT = 600.0  # seconds
_OPEN = (Status.READY, Status.PAUSED)


@dataclass(frozen=True)
class _Need:
    """Replicas that could run a request: those of a group, of a version, or only the owner."""

    group: str | None
    version: Version | None
    owner: str | None


class Gate:
    """Gate of requests; see the module. All methods run on one event loop.

    Args:
        fleet: All replicas.

    Attributes:
        held_group: Group whose requests all wait; None without one.
        max_wait: Longest wait of a request in seconds.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._waiting: dict[_Need, set[asyncio.Future[None]]] = {}
        self.held_group: str | None = None
        self.max_wait = USUAL_WAIT

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    async def admit(self, group: str | None, version: Version | None = None, owner: str | None = None) -> None:
        """Wait while replicas that could run a request get new weights.

        Args:
            group: Group of replicas; None if there is at most one.
            version: Version that the request's group of samples is bound to; None without one.
            owner: URL of the only replica that can answer; None if all of the group can.

        Raises:
            ApiError: 503 if that takes longer than `max_wait`.
        """
        need = _Need(group, version, owner)
        if not self._is_held(need):
            return
        try:
            await within(self.max_wait, self._opened(need))
        except asyncio.TimeoutError:
            message = f"the replicas have been getting new weights for more than {self.max_wait:g} s; try again"
            headers = {"Retry-After": "1"}
            raise ApiError(503, message, kind=FAULT, code="weights_updating", headers=headers) from None

    async def _opened(self, need: _Need) -> None:
        while self._is_held(need):  # it may be shut again before a request that was let through runs on
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(need, set())
            waiting.add(opened)
            try:
                await opened
            finally:
                waiting.discard(opened)
                if not waiting and self._waiting.get(need) is waiting:
                    del self._waiting[need]

    def look(self) -> None:
        """Let requests go on that need not wait any longer."""
        for need in [need for need in self._waiting if not self._is_held(need)]:
            for opened in self._waiting.pop(need):
                if not opened.done():
                    opened.set_result(None)

    def _is_held(self, need: _Need) -> bool:
        members = self._fleet.groups.members(need.group, self._fleet.members.values())
        if need.owner is not None:
            members = [member for member in members if member.url == need.owner]
        if need.version is not None:
            members = [member for member in members if member.version == need.version]
        can_end = need.version is not None and any(member.is_draining_for_update for member in members)
        if self.held_group is not None and need.group in (None, self.held_group):
            return not can_end and (need.version is None or bool(members))
        is_open = any(member.status in _OPEN and member.is_known for member in members)
        return not is_open and not can_end and any(_is_soon_back(member) for member in members)


def _is_soon_back(member: Member) -> bool:
    return member.is_known and member.status is Status.UPDATING
