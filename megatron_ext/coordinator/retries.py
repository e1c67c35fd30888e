"""Retries of a request: the replicas tried so far, and the error if none of them answers."""

from __future__ import annotations

from megatron_ext.coordinator.replica_client import BadAnswer, CallFailed, CompleteAnswer
from megatron_ext.server.api_errors import FAULT, OVERLOADED, REQUEST_FAILED, ApiError

# After three lost replicas the request itself may be the cause: it is not sent to a fourth one.
MAX_LOST = 3
MAX_FAILED = 2  # the same for answers of 500: the replicas have tried several times themselves
_ENDED_ON_PURPOSE = "request_aborted"
_SHORTEST_WAIT, _LONGEST_WAIT = 1, 60  # seconds


class Retries:
    """Retry state of one request."""

    def __init__(self) -> None:
        self.excluded: set[str] = set()  # URLs of replicas
        self._waits: list[int] = []  # Retry-After of full replicas, in seconds
        self._lost = self._failed = 0
        self._failure: CompleteAnswer | None = None
        self._bad: BadAnswer | None = None
        self._error: CallFailed | None = None

    @property
    def may_go_on(self) -> bool:
        """True if the request may be sent to another replica."""
        return self._lost + self._failed < MAX_LOST and self._failed < MAX_FAILED

    def lost(self, url: str, error: CallFailed) -> None:
        """Record a replica that did not answer."""
        self.excluded.add(url)
        self._error = error
        self._lost += error.has_reached

    def answered_badly(self, url: str, error: BadAnswer) -> None:
        """Record a replica whose answer cannot be used."""
        self.excluded.add(url)
        self._bad = error
        self._lost += 1

    def retry_elsewhere(self, url: str, answer: CompleteAnswer) -> bool:
        """Return whether another replica might give a better answer than this one."""
        self.excluded.add(url)
        if answer.status == 429:
            self._waits.append(retry_after(answer))
            return True
        if answer.status < 500 or _code(answer) in (_ENDED_ON_PURPOSE, REQUEST_FAILED):
            return False
        self._failure = answer
        self._failed += answer.status == 500
        return True

    def verdict(self) -> CompleteAnswer:
        """Return the last answer, unless it was a refusal.

        Raises:
            ApiError: 429 if a replica was full, with the shortest wait; 502 if an answer could not be used; 503 if
                there is no replica.
        """
        if self._waits and self.may_go_on:
            wait = min(self._waits)
            raise ApiError(
                429,
                f"all reachable replicas are full ({len(self._waits)}); try again in {wait} s",
                kind=OVERLOADED,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        if self._failure is not None:
            return self._failure
        if self._bad is not None:
            raise bad_answer(self._bad)
        if self._error is not None:
            message = f"no replica answered ({len(self.excluded)} tried); last error: {self._error}"
            raise ApiError(503, message, kind=FAULT, code="replica_lost", headers={"Retry-After": "1"})
        raise no_replica()


def bad_answer(error: BadAnswer) -> ApiError:
    """502: what a replica answers cannot be passed on."""
    return ApiError(502, f"a replica does not answer as a server does: {error}", kind=FAULT, code="bad_replica_answer")


def no_replica() -> ApiError:
    """503: no replica takes requests."""
    message = "no replica accepts requests now"
    return ApiError(503, message, kind=FAULT, code="no_replica", headers={"Retry-After": str(_SHORTEST_WAIT)})


def retry_after(answer: CompleteAnswer) -> int:
    """Return the seconds of an answer's Retry-After header, within bounds."""
    text = dict(answer.headers).get(b"retry-after", b"").decode("latin-1")
    return min(_LONGEST_WAIT, max(_SHORTEST_WAIT, int(text))) if text.isdecimal() and len(text) < 10 else _SHORTEST_WAIT


def _code(answer: CompleteAnswer) -> object:
    content = answer.json()
    error = content.get("error") if isinstance(content, dict) else None
    return error.get("code") if isinstance(error, dict) else None
