"""Calls that wait until a client's requests have ended, and requests that wait for those calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_ext.engine.client_request import EngineRequest


@dataclass(eq=False)
class HeldRequests:
    """Requests that are submitted once no call waits any more.

    Attributes:
        requests: The requests, which the engine gets all or none.
        future: Done when the engine has them.
    """

    requests: Sequence[EngineRequest]
    future: Future[None]


@dataclass(eq=False)
class _WaitingCall:
    run: Callable[[], object]
    is_armed: bool = False


class IdleGate:
    """Gate of an engine client: closed while a call waits for the end of the requests submitted before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[_WaitingCall] = deque()
        self._held: list[HeldRequests] = []

    def close(self, run: Callable[[], object]) -> Callable[[], None]:
        """Hold requests from now on, until `run` has been called.

        Args:
            run: Called by `open` when all requests submitted before have ended; raises nothing.

        Returns:
            A function for the engine's thread to call after the requests submitted before have been added.
        """
        call = _WaitingCall(run)
        with self._lock:
            self._calls.append(call)

        def arm() -> None:
            call.is_armed = True

        return arm

    def hold(self, requests: Sequence[EngineRequest]) -> Future[None] | None:
        """Hold requests if the gate is closed; return None if it is open."""
        with self._lock:
            if not self._calls:
                return None
            held = HeldRequests(requests, Future())
            self._held.append(held)
            return held.future

    def open(self) -> list[HeldRequests]:
        """Make the calls that wait, while no request is left; return the requests held meanwhile, if no call is left.

        Only for the engine's thread.
        """
        while self._calls and self._calls[0].is_armed:
            self._calls[0].run()
            with self._lock:
                self._calls.popleft()
        with self._lock:
            held, self._held = (self._held, []) if not self._calls else ([], self._held)
        return held
