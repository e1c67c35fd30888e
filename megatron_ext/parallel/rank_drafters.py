"""Drafts that ranks compute together: rank 0 sends a command, the last stage computes, and all ranks learn the drafts.

Every rank of a replica obeys the same commands between the same steps, so its drafter has read the same tokens, and has
forgotten the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.distributed import ProcessGroup, broadcast

from megatron_ext.parallel.commands import Call
from megatron_ext.parallel.driver import Driver
from megatron_ext.speculation.drafter import Drafter, DraftRequest

Drafts = Mapping[int, tuple[int, ...]]


class RankDrafter:
    """Drafter of one rank for a replica's commands.

    Args:
        group: The replica's ranks, and rank 0.
        rank: This rank.
        source: The rank whose drafts count.
        layer: Drafter of this rank's part of the replica; None on ranks that compute no drafts of it.
    """

    def __init__(self, group: ProcessGroup, rank: int, source: int, layer: Drafter | None) -> None:
        self._group, self._rank, self._source = group, rank, source
        self.layer = layer

    def forget(self, request_id: int | None) -> None:
        """Forget a request, or all of them."""
        if self.layer is None:
            return
        if request_id is None:
            self.layer.reset()
        else:
            self.layer.forget(request_id)

    def propose(self, limits: Sequence[tuple[int, int]], tokens_of: Callable[[int], Sequence[int]]) -> Drafts:
        """Compute this rank's part of the drafts and return the replica's.

        Args:
            limits: (request id, maximum number of drafts) of each request.
            tokens_of: Returns the tokens of a request.
        """
        found: Drafts = {}
        if self.layer is not None:
            found = self.layer.propose([DraftRequest(name, tokens_of(name), limit) for name, limit in limits])
        return self._share(limits, found)

    def _share(self, limits: Sequence[tuple[int, int]], found: Drafts) -> Drafts:
        """Return the source's drafts: of each request their number, then as many places as its limit."""
        if self._group.size() == 1:
            return found
        row = torch.zeros(sum(1 + limit for _, limit in limits), dtype=torch.int64)
        if self._rank == self._source:
            parts = [(found.get(name, ()), limit) for name, limit in limits]
            row = torch.tensor([one for own, limit in parts for one in (len(own), *own, *[0] * (limit - len(own)))])
        broadcast(row, self._source, group=self._group)
        numbers, drafts, place = row.tolist(), {}, 0
        for name, limit in limits:
            count = numbers[place]
            drafts[name] = tuple(numbers[place + 1 : place + 1 + count])
            place += 1 + limit
        return drafts


class LeadingDrafter(Drafter):
    """Drafter of rank 0 whose drafts the ranks of each replica compute.

    Args:
        drafters: Drafter for the commands of each replica.
        own: Drafter of this rank's part of the model, whose pools come and go with the engine's; None without one.

    Attributes:
        driver: Driver of the engine core; set before the first step.
    """

    driver: Driver

    def __init__(self, drafters: Sequence[RankDrafter], own: Drafter | None) -> None:
        self._drafters = drafters
        self.parts = [] if own is None else [own]

    def propose(self, requests: Sequence[DraftRequest]) -> Drafts:
        """Propose drafts; see `Drafter`. The requests are of one replica.

        Raises:
            RankError: The ranks are no longer in step.
        """
        if not requests:
            return {}
        replica = self.driver.replica_of(requests[0].request_id)
        tokens = {request.request_id: request.tokens for request in requests}
        limits = tuple((request.request_id, request.limit) for request in requests)
        self.driver.draft(replica, limits)
        try:
            return self._drafters[replica].propose(limits, tokens.__getitem__)
        except Exception as error:
            raise self.driver.step_error(error) from error

    def forget(self, request_id: int) -> None:
        """Forget a request, on all ranks before the next step."""
        self._forget(request_id)

    def reset(self) -> None:
        """Forget all requests, on all ranks before the next step."""
        self._forget(None)

    def notice_new_weights(self) -> None:
        """Forget all requests, since their drafting states come from the old weights."""
        self.reset()

    def _forget(self, request_id: int | None) -> None:
        self.driver.note(Call("forget_drafts", (request_id,)))
        for drafter in self._drafters:
            drafter.forget(request_id)
