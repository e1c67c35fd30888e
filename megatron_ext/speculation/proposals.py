"""Proposals of a drafter, requested and checked before a step is planned. A faulty proposal costs its drafts only."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.spec_decode.drafts import SpecDecodeResult
from megatron_ext.scheduling.spec_decode.verification import max_drafts
from megatron_ext.speculation.drafter import Drafter, DraftRequest


class DraftError(ValueError):
    """Error: a drafter has returned something that is not a list of drafts."""


class Proposals:
    """Checked access of an engine to its drafter, whose errors of any kind are raised.

    Args:
        drafter: Drafter; may raise, and return anything.
        has_tokens: Returns whether all of these ids, plain integers, are tokens of the model.
    """

    def __init__(self, drafter: Drafter, has_tokens: Callable[[Sequence[int]], bool]) -> None:
        self._drafter = drafter
        self._has_tokens = has_tokens
        self._idle_steps = 0  # steps left without a call of the drafter

    def propose(self, scheduler: Scheduler) -> tuple[dict[int, tuple[int, ...]], list[DraftError]]:
        """Request drafts for the requests that decode in the next step.

        Returns:
            Valid drafts by request id, and the errors of invalid ones.
        """
        if self._idle_steps:
            self._idle_steps -= 1
            return {}, []
        requests = _draft_requests(scheduler)
        if not requests:
            return {}, []
        answers = self._drafter.propose(requests)
        self._idle_steps = self._drafter.idle_steps
        errors: list[DraftError] = []
        drafts = {}
        # Any drafter may be plugged in, so its answer may have any type: compare it instead of testing its truth.
        for request in requests if answers != {} else ():
            try:
                given = self._checked(request, answers)
            except DraftError as error:
                errors.append(error)
                continue
            if given:
                drafts[request.request_id] = given
        return drafts, errors

    def _checked(self, request: DraftRequest, answers: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
        """Return the drafts of a request as plain integers.

        Raises:
            DraftError: The proposal is not a valid list of drafts.
        """
        name = request.request_id
        try:
            given = tuple(map(operator.index, answers.get(name, ())))
        except (AttributeError, TypeError) as error:
            raise DraftError(f"no drafts of request {name}: {error}") from error
        if len(given) > request.limit:
            raise DraftError(
                f"{len(given)} drafts of request {request.request_id}, more than the limit of {request.limit}"
            )
        if not self._has_tokens(given):
            raise DraftError(f"a draft of request {name} is not a token of the model, among {given}")
        return given

    def update(self, verified: Iterable[SpecDecodeResult]) -> None:
        """Report the results of a step's verification to the drafter."""
        for one in verified:
            self._drafter.accepted(one.request_id, one.drafted, one.accepted)

    def forget(self, requests: Iterable[Request]) -> None:
        """Tell the drafter that these requests have ended."""
        for request in requests:
            self._drafter.forget(request.request_id)


def _draft_requests(scheduler: Scheduler) -> list[DraftRequest]:
    """Return the requests that decode in the next step and may have drafts, each with its limit."""
    limits = {
        request: max_drafts(request, scheduler.limits)
        for request in (*scheduler.queues.running, *scheduler.queues.paused)
        if request.is_decoding
    }
    return [DraftRequest(one.request_id, one.tokens, limit) for one, limit in limits.items() if limit]
