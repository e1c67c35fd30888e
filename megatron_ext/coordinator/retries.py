"""Which replicas have been tried for one request, and what to tell its client if none of them answers."""

from __future__ import annotations

from megatron_ext.coordinator.replica_client import CallFailed, Whole
from megatron_ext.server.api_errors import FAULT, OVERLOADED, ApiError

# A request that three replicas have died or failed of may be why; it is given to no fourth one.
MAX_LOST = 3
_ENDED_ON_PURPOSE = "request_aborted"
_SHORTEST_WAIT, _LONGEST_WAIT = 1, 60  # seconds


class Retries:
    """Of one request."""

    def __init__(self) -> None:
        self.excluded: set[str] = set()  # URLs of replicas
        self._waits: list[int] = []  # of those that were full, seconds
        self._lost = 0
        self._failure: Whole | None = None
        self._error: CallFailed | None = None

    @property
    def may_go_on(self) -> bool:
        """Whether it is given to another one."""
        return self._lost < MAX_LOST

    def lost(self, url: str, error: CallFailed) -> None:
        """A replica did not answer."""
        self.excluded.add(url)
        self._error = error
        self._lost += error.has_reached

    def goes_elsewhere(self, url: str, answer: Whole) -> bool:
        """Whether another replica might do better than this answer."""
        self.excluded.add(url)
        if answer.status == 429:
            self._waits.append(retry_after(answer))
            return True
        if answer.status < 500 or _code(answer) == _ENDED_ON_PURPOSE:
            return False
        self._failure = answer
        self._lost += answer.status == 500
        return True

    def verdict(self) -> Whole:
        """What was answered last, if it was no refusal.

        Raises:
            ApiError: 429 if somebody was full, with the shortest wait; 503 if nobody is there.
        """
        if self._waits and self.may_go_on:
            wait = min(self._waits)
            raise ApiError(
                429,
                f"all replicas that can be reached are full ({len(self._waits)}); try again in {wait} s",
                kind=OVERLOADED,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        if self._failure is not None:
            return self._failure
        if self._error is not None:
            message = f"no replica has answered ({len(self.excluded)} tried); the last one: {self._error}"
            raise ApiError(503, message, kind=FAULT, code="replica_lost", headers={"Retry-After": "1"})
        raise no_replica()


def no_replica() -> ApiError:
    """503: there is none that takes requests."""
    message = "no replica takes requests now"
    return ApiError(503, message, kind=FAULT, code="no_replica", headers={"Retry-After": str(_SHORTEST_WAIT)})


def retry_after(answer: Whole) -> int:
    """Seconds that a replica asks to wait."""
    text = dict(answer.headers).get(b"retry-after", b"").decode("latin-1")
    return min(_LONGEST_WAIT, max(_SHORTEST_WAIT, int(text))) if text.isdecimal() and len(text) < 10 else _SHORTEST_WAIT


def _code(answer: Whole) -> object:
    content = answer.json()
    error = content.get("error") if isinstance(content, dict) else None
    return error.get("code") if isinstance(error, dict) else None
