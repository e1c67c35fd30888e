"""Passage of an engine's events from its thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_ext.engine.client import ClientListener
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.engine_step import StepOutput
from megatron_ext.errors import RankError
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.server.monitoring.metrics import Metrics

LONGEST_DELIVERY = 1.0  # seconds that a step waits for the event loop, which may be closed


class EngineEvents(Protocol):
    """Receiver of events, in the event loop."""

    def note_step(self, *, has_computed: bool, records: Sequence[RequestRecord]) -> None:
        """Note a step that has not failed."""

    def note_failed_step(self) -> None:
        """Note a failed step."""

    def note_lost_ranks(self, error: RankError) -> None:
        """Note the loss of other ranks."""

    def deliver(self, requests: Sequence[EngineRequest]) -> None:
        """Deliver new output of requests."""


class TokenClock:
    """Time of the last token of each request."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}  # request id -> tokens then, and seconds

    def gaps(self, counts: dict[int, int]) -> list[float]:
        """Return the seconds since the previous token, for each token that is not its request's first.

        Tokens that arrive together share the time equally.
        """
        now = time.monotonic()
        found = []
        for request_id, count in counts.items():
            before, moment = self._last.get(request_id, (0, now))
            if count > before:
                self._last[request_id] = count, now
                if before:
                    found += [(now - moment) / (count - before)] * (count - before)
        return found

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended."""
        self._last.pop(request_id, None)


class EngineListener(ClientListener):
    """Engine listener that passes events of the engine's thread on to the event loop.

    Args:
        engine: The engine.
        metrics: Receives the engine's numbers after every call.
        manager: Receives the other events, in its event loop.
        loop: The manager's event loop.
    """

    def __init__(
        self, engine: LLMEngine, metrics: Metrics, manager: EngineEvents, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._manager = manager
        self._loop = loop
        self._clock = TokenClock()

    def on_step(self, output: StepOutput) -> None:
        """Observe the gaps between tokens, and record the step in the event loop."""
        self.on_call()  # before any client hears of the step
        has_computed = bool(output.active) or any(one.status is Status.COMPLETED for one in output.records)
        self._post(lambda: self._manager.note_step(has_computed=has_computed, records=output.records))
        with self._engine.error_isolation.guard("the metrics of a step"):
            self._observe_tokens(output)

    def _observe_tokens(self, output: StepOutput) -> None:
        counts = {request.request_id: request.generated_count for request in output.active}
        counts |= {record.request_id: len(record.generated_tokens) for record in output.records}
        for gap in self._clock.gaps(counts):
            self._metrics.inter_token.observe(gap)
        for record in output.records:
            self._clock.forget(record.request_id)

    def on_delivery(self, requests: Sequence[EngineRequest]) -> None:
        """Deliver in the event loop, and wait: a slow event loop slows steps down instead of growing a queue."""
        delivered = threading.Event()

        def deliver() -> None:
            try:
                self._manager.deliver(requests)
            finally:
                delivered.set()

        self._post(deliver)
        delivered.wait(LONGEST_DELIVERY)

    def on_call(self) -> None:
        """Publish the engine's numbers for readers of metrics."""
        with self._engine.error_isolation.guard("the metrics of the engine"):
            self._metrics.state = self._engine.current_statistics()

    def on_failed_step(self, error: Exception) -> None:
        """Record the failed step in the event loop."""
        self._post(self._manager.note_failed_step)

    def on_lost_ranks(self, error: RankError) -> None:
        """End all requests in the event loop."""
        self._post(lambda: self._manager.note_lost_ranks(error))

    def _post(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)
