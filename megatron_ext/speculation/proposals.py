"""A drafter's answers, asked for and checked before a step is planned. Whatever is wrong with one costs its drafts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_ext.scheduling.drafts import Verified
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.verification import most_drafts
from megatron_ext.speculation.drafter import DraftAsk, Drafter


class DraftError(ValueError):
    """A drafter has answered what no drafts are."""


class Proposals:
    """A drafter, as an engine uses it.

    Args:
        drafter: May raise, and answer anything.
        has_tokens: Whether all of these ids, plain integers, are tokens of the model.
    """

    def __init__(self, drafter: Drafter, has_tokens: Callable[[Sequence[int]], bool]) -> None:
        self._drafter = drafter
        self._has_tokens = has_tokens

    def ask(self, scheduler: Scheduler) -> tuple[dict[int, tuple[int, ...]], list[DraftError]]:
        """Drafts for the requests that decode in the next step.

        Returns:
            Those that are drafts, by request id; and what is wrong with the others.

        Raises:
            Exception: Whatever the drafter raises.
        """
        asks = [ask for request in _decoding(scheduler) if (ask := _ask(request, scheduler)) is not None]
        if not asks:
            return {}, []
        answers = self._drafter.propose(asks)
        drafts, errors = {}, []
        for ask in asks:
            try:
                given = self._checked(ask, answers)
            except DraftError as error:
                errors.append(error)
                continue
            if given:
                drafts[ask.request_id] = given
        return drafts, errors

    def _checked(self, ask: DraftAsk, answers: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
        """The drafts of a request as plain integers.

        Raises:
            DraftError: They are none.
        """
        try:
            answer = answers.get(ask.request_id, ())
            given = tuple(map(operator.index, answer))
        except (AttributeError, TypeError) as error:
            raise DraftError(f"no drafts of request {ask.request_id}: {error}") from error
        if len(given) > ask.limit:
            raise DraftError(f"{len(given)} drafts of request {ask.request_id}, where at most {ask.limit} were asked")
        if not self._has_tokens(given):
            raise DraftError(f"a draft of request {ask.request_id} is no token of the model, among {given}")
        return given

    def tell(self, verified: Iterable[Verified]) -> None:
        """What became of drafts in a step.

        Raises:
            Exception: Whatever the drafter raises.
        """
        for one in verified:
            self._drafter.accepted(one.request_id, one.drafted, one.accepted)

    def forget(self, requests: Iterable[Request]) -> None:
        """These requests have ended.

        Raises:
            Exception: Whatever the drafter raises.
        """
        for request in requests:
            self._drafter.forget(request.request_id)


def _decoding(scheduler: Scheduler) -> list[Request]:
    queues = scheduler.queues
    return [request for request in (*queues.running, *queues.paused) if request.is_decoding]


def _ask(request: Request, scheduler: Scheduler) -> DraftAsk | None:
    limit = most_drafts(request, scheduler.limits)
    return DraftAsk(request.request_id, request.tokens, limit) if limit else None
