"""What the engine's thread does for the event loop: between two steps, and in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.server.exchange import HttpExchange
from megatron_ext.server.metrics import Metrics
from megatron_ext.server.progress import TokenClock
from megatron_ext.stepping.progress import Update, Updates

Result = TypeVar("Result")


@dataclass(frozen=True)
class StepOutcome:
    """What a step did to requests that the event loop knows."""

    updates: dict[int, Update]
    records: list[RequestRecord]
    has_computed: bool
    has_more: bool  # something is left to be done or reported

    @property
    def request_ids(self) -> list[int]:
        """Of all requests that there is something of."""
        return [*self.updates, *(record.request_id for record in self.records)]


class EngineSide:
    """The calls of the engine that requests make. All of them run in its thread.

    Args:
        engine: Nobody else may touch it.
        metrics: Told what happens.
    """

    def __init__(self, engine: InferenceEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._updates = Updates(engine.fail_request)
        self._clock = TokenClock()

    def observed(self, function: Callable[..., Result], arguments: tuple[object, ...]) -> Result:
        """Call something, and leave the engine's numbers for whoever reads metrics."""
        try:
            return function(*arguments)
        finally:
            with self._engine.faults.absorbed("the metrics of the engine"):
                self._metrics.state = self._engine.statistics()

    def add(self, exchange: HttpExchange) -> None:
        """Hand an exchange's requests to the engine, all or none.

        Raises:
            ConfigError: A prompt or setting that makes no sense.
        """
        ids = []
        try:
            for handle in exchange.handles:
                self._engine.add_request(handle.request_id, handle.job.tokens, handle.job.params)
                ids.append(handle.request_id)
        except Exception:
            self.abort(ids)
            raise
        if exchange.is_streamed:
            self._updates.watch(ids)

    def abort(self, ids: Iterable[int]) -> None:
        """End those that are alive."""
        for request_id in ids:
            try:
                self._engine.abort_request(request_id)
            except KeyError:  # has ended in the meantime
                continue
            except Exception as error:
                self._engine.faults.note(f"the end of request {request_id}", error)

    def step(self) -> StepOutcome:
        """One step, and what it brings."""
        result = self._engine.step_modern()
        records = result["finished_request_records"]
        active = [self._engine.get_request(request_id) for request_id in result["active_request_ids"]]
        with self._engine.faults.absorbed("the metrics of a step"):
            self._observe_tokens(active, records)
        self._updates.forget(record.request_id for record in records)
        has_computed = bool(active) or any(record.status is Status.COMPLETED for record in records)
        updates = self._updates.of(active)
        return StepOutcome(updates, records, has_computed, self._engine.has_unfinished_requests())

    def _observe_tokens(self, active: Sequence[Request], records: Sequence[RequestRecord]) -> None:
        counts = {request.request_id: request.generated_count for request in active}
        counts |= {record.request_id: len(record.generated_tokens) for record in records}
        for gap in self._clock.gaps(counts):
            self._metrics.inter_token.observe(gap)
        for record in records:
            self._clock.forget(record.request_id)
