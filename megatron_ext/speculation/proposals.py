"""A drafter's answers, asked for and checked before a step is planned. Whatever is wrong with one costs its drafts."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.spec_decode.drafts import SpecDecodeResult
from megatron_ext.scheduling.spec_decode.verification import max_drafts
from megatron_ext.speculation.drafter import DraftAsk, Drafter

PATIENCE = 10.0  # seconds that a drafter may take for a step; a long prompt that a model reads takes some
FIRST_REST, LONGEST_REST = 16, 4096  # steps in which one that took longer is not asked


class DraftError(ValueError):
    """A drafter has answered what no drafts are."""


class Proposals:
    """A drafter, as an engine uses it.

    Args:
        drafter: May raise, and answer anything.
        has_tokens: Whether all of these ids, plain integers, are tokens of the model.
        clock: Seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        has_tokens: Callable[[Sequence[int]], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._has_tokens = has_tokens
        self._clock = clock
        self._rest = 0  # steps in which it is not asked
        self._next_rest = FIRST_REST

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
        if self._rest:
            self._rest -= 1
            return {}, []
        started = self._clock()
        answers = self._drafter.propose(asks)
        seconds = self._clock() - started
        if seconds > PATIENCE:
            self._rest, self._next_rest = self._next_rest, min(LONGEST_REST, 2 * self._next_rest)
            late = f"drafts came after {seconds:.1f} seconds; none are asked for in the next {self._rest} steps"
            return {}, [DraftError(late)]
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

    def tell(self, verified: Iterable[SpecDecodeResult]) -> None:
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
    limit = max_drafts(request, scheduler.limits)
    return DraftAsk(request.request_id, request.tokens, limit) if limit else None
