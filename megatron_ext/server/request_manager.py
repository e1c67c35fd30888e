"""Request manager: admission, delivery to the event loop, health, and sleep.

The `EngineClient` steps the engine in a thread of its own. The event loop only sees values that the engine's thread
made for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from megatron_ext.config.batching import SuspendLevel
from megatron_ext.engine.client import ClientListener
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.error_isolation import ErrorIsolation
from megatron_ext.engine.result import StepOutput
from megatron_ext.engine.updates import Progress, Update
from megatron_ext.errors import EngineClosed, EngineSuspended, RankError
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.server.api_errors import OVERLOADED, ApiError, asleep, engine_fault, shutting_down
from megatron_ext.server.monitoring.metrics import Metrics
from megatron_ext.server.monitoring.request_trace import RequestTrace

if TYPE_CHECKING:
    from megatron_ext.models.llm_engine import LLMEngine

LONGEST_DELIVERY = 1.0  # seconds that a step waits for the event loop, which may be closed
LATENCIES = 32  # latencies of the last requests; they estimate the duration of a new one
LONGEST_RETRY = 60  # seconds


@dataclass(eq=False)
class RequestHandle(EngineRequest):
    """Request of the server, with what the event loop knows of its output.

    Attributes:
        progress: Output so far, of a streamed request.
        result: Whole output, once the request has ended.
        error: Reason for a missing result, once the request was given up.
    """

    progress: Progress | None = None
    result: RequestRecord | None = None
    error: ApiError | None = None

    @property
    def has_ended(self) -> bool:
        """True once there is a result or an error."""
        return self.result is not None or self.error is not None

    def take(self, update: Update) -> None:
        """Append an update."""
        if self.progress is None:
            self.progress = Progress(update)
        self.progress.add(update)


@dataclass(eq=False)
class RequestGroup:
    """Handles of one HTTP request.

    Attributes:
        handles: Handles, prompt by prompt.
        on_abort: Aborts handles in the engine.
        sender: Router that sent the request; empty for a request of a client.
        on_result: Called with each record that completes, before it is delivered.
    """

    handles: list[RequestHandle]
    on_abort: Callable[[list[RequestHandle]], None]
    sender: str = ""
    on_result: Callable[[RequestRecord], None] = lambda _: None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def started(self) -> None:
        """Wait until a handle has progress or has ended."""
        while not any(handle.progress or handle.has_ended for handle in self.handles):
            await self.next_update()

    async def ended(self) -> None:
        """Wait until all handles have ended."""
        while not all(handle.has_ended for handle in self.handles):
            await self.next_update()

    async def next_update(self) -> None:
        """Wait until a handle has changed since the last call."""
        await self.changed.wait()
        self.changed.clear()

    def abort(self) -> None:
        """Abort the handles that have not ended; return at once."""
        self.on_abort([handle for handle in self.handles if not handle.has_ended])


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
        self, engine: LLMEngine, metrics: Metrics, manager: RequestManager, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._engine, self._metrics, self._manager, self._loop = engine, metrics, manager, loop
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


class RequestManager:
    """Bridge between HTTP handlers and the engine: submits requests, and delivers their output to the event loop.

    Created in the event loop's thread, which calls all methods. An error in a delivery ends its request only.

    Args:
        engine: The engine.
        metrics: Updated with every step and request.
        capacity: Maximum number of requests at once.
        is_shared: Whether other code closes the engine; otherwise `stop` does.

    Attributes:
        groups: Groups of requests in flight, by the ids of their answers.
        recent: Requests that have ended, for traces.
        is_healthy: False from a failed step until a later step has computed something.
        lost_ranks: Error that ended all requests: other ranks are lost; None while they live.
        on_lost_ranks: Called when other ranks are lost.
    """

    def __init__(self, engine: LLMEngine, metrics: Metrics, capacity: int, *, is_shared: bool = False) -> None:
        self._engine = engine
        self.client = engine.client
        self._is_shared = is_shared
        self._metrics = metrics
        self.capacity = capacity
        self._living: dict[RequestHandle, RequestGroup] = {}
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._waiting: list[tuple[str, asyncio.Event]] = []  # for the end of others' requests than a router's
        self.groups: WeakValueDictionary[str, RequestGroup] = WeakValueDictionary()
        self.recent = RequestTrace()
        self.is_healthy = True
        self.on_lost_ranks: Callable[[], None] = lambda: None
        self.lost_ranks: RankError | None = None
        self._is_ending = False
        self._is_closed = False
        self.is_asleep = False
        self._falling_asleep = asyncio.Lock()  # and waking up
        self._error_isolation = ErrorIsolation("the server")  # faults of the event loop

    def start(self) -> None:
        """Start to take requests; called in the running event loop."""
        self._metrics.state, _ = self._engine.counts()
        self.client.listen(EngineListener(self._engine, self._metrics, self, asyncio.get_running_loop()))

    async def stop(self) -> None:
        """End the remaining requests, and wait for the step in flight."""
        self.end_all()
        self._is_closed = True
        if self._is_shared:
            with contextlib.suppress(EngineClosed):
                await asyncio.to_thread(self.client.listen, None)
        else:
            await asyncio.to_thread(self._engine.close)

    @property
    def error_count(self) -> int:
        """Number of errors since the start: failed steps, and faults of the engine and the server."""
        return self._error_isolation.count + self._engine.error_isolation.count

    @property
    def living(self) -> int:
        """Number of requests that have not ended."""
        return len(self._living)

    def load_of_others(self, sender: str) -> tuple[int, int, int]:
        """Return the load of the requests in flight that a router has not sent.

        Args:
            sender: Identifier of the router; empty for the load of all requests.

        Returns:
            The number of the requests, their prompt tokens without an answer, and the tokens they may generate.
        """
        others = [handle for handle, group in self._living.items() if not sender or group.sender != sender]
        prompt_tokens = sum(len(handle.inputs.prompt_tokens) for handle in others if handle.progress is None)
        return len(others), prompt_tokens, sum(one.inputs.params.num_tokens_to_generate for one in others)

    async def wait_for_others(self, sender: str, patience: float) -> None:
        """Wait until there are no requests in flight that a router has not sent.

        Args:
            sender: Identifier of the router.
            patience: Maximum wait in seconds.
        """
        waiting = sender, asyncio.Event()
        self._waiting.append(waiting)
        try:
            if self._has_others(sender):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(waiting[1].wait(), patience)
        finally:
            self._waiting.remove(waiting)

    def _has_others(self, sender: str) -> bool:
        return any(group.sender != sender for group in self._living.values())

    async def submit(
        self,
        inputs: Sequence[RequestInputs],
        *,
        is_streamed: bool,
        sender: str = "",
        on_result: Callable[[RequestRecord], None] = lambda _: None,
    ) -> RequestGroup:
        """Submit requests to the engine, all or none.

        Args:
            inputs: Prompts and parameters.
            is_streamed: Whether output is delivered while it is generated.
            sender: Router that sent the requests; empty for a client.
            on_result: See `RequestGroup`.

        Raises:
            ApiError: The queue is full (429); the server is asleep or shutting down (503).
            ConfigError: A prompt or setting is invalid.
        """
        self._check_capacity(len(inputs))
        handles = [RequestHandle(one, is_streamed=is_streamed) for one in inputs]
        group = RequestGroup(handles, self.abort, sender, on_result)
        self._living |= dict.fromkeys(handles, group)  # first: the engine may deliver before the submission returns
        try:
            await asyncio.wrap_future(self.client.submit(handles))
        except EngineClosed:
            self._forget(handles)
            raise shutting_down() from None
        except EngineSuspended:  # by the other users of the client
            self._forget(handles)
            raise asleep() from None
        except BaseException as error:
            if not isinstance(error, Exception):  # cancelled, and the engine may have taken them
                group.abort()
            self._forget(handles)  # requests that the engine never takes have no end that would do this
            raise
        return group

    def _check_capacity(self, count: int) -> None:
        if self._is_ending:
            raise shutting_down()
        if self.is_asleep:
            raise asleep()
        if self.living + count > self.capacity:
            self._metrics.rejected.inc(count)
            mean = sum(self._latencies) / len(self._latencies) if self._latencies else 1
            wait = min(LONGEST_RETRY, max(1, math.ceil(mean)))
            message = f"the server has {self.living} requests, and its limit is {self.capacity}; try again in {wait} s"
            retry = {"Retry-After": str(wait)}
            raise ApiError(429, message, kind=OVERLOADED, code="rate_limit_exceeded", headers=retry)

    def abort(self, handles: Iterable[RequestHandle]) -> None:
        """Free the resources of these requests after the step in flight; return at once."""
        if not self._is_closed:
            self.client.abort(handles, at_once=True)

    def end_all(self) -> None:
        """End all requests with a 503, and refuse new ones."""
        self._is_ending = True
        self.give_up(shutting_down())

    def give_up(self, error: ApiError) -> None:
        """End all requests with an error."""
        self._end(list(self._living), error)

    def end(self, group: RequestGroup, error: ApiError) -> int:
        """End the unfinished requests of a group with an error; return their number."""
        ended = [handle for handle in group.handles if handle in self._living]
        self._end(ended, error)
        return len(ended)

    def _end(self, ended: Sequence[RequestHandle], error: ApiError) -> None:
        if not ended:
            return
        self.abort(ended)
        groups = [self._living[handle] for handle in ended]
        self._forget(ended)
        for handle, group in zip(ended, groups, strict=True):
            handle.error = error
            group.changed.set()

    async def reset_prefix_cache(self) -> dict[str, float] | None:
        """Empty the cache; return its contents afterwards."""
        await asyncio.to_thread(self._engine.reset_prefix_cache)
        statistics, _ = await asyncio.to_thread(self._engine.counts)
        return statistics.prefix_cache()

    async def sleep(self, level: SuspendLevel | None = None) -> SuspendLevel:
        """Suspend the engine after the step in flight, and return the level; see `LLMEngine.suspend`."""
        async with self._falling_asleep:
            before, self.is_asleep = self.is_asleep, True
            try:
                return await asyncio.to_thread(self._engine.suspend, level)
            except Exception:
                self.is_asleep = before
                raise

    async def wake_up(self) -> None:
        """Allocate the pools again, and continue. If that fails the server stays asleep."""
        async with self._falling_asleep:
            await asyncio.to_thread(self._engine.resume)
            self.is_asleep = False

    @property
    def is_paused(self) -> bool:
        """True while generation is paused."""
        return self.client.pausing is not None

    @property
    def status(self) -> str:
        """Status of the server: "failing", "asleep", "paused" or "ok"."""
        awake = "paused" if self.is_paused else "ok"
        return "failing" if not self.is_healthy else "asleep" if self.is_asleep else awake

    # Called in the event loop on behalf of the engine's thread

    def note_step(self, *, has_computed: bool, records: Sequence[RequestRecord]) -> None:
        """Record a step that has ended."""
        self.is_healthy = self.is_healthy or has_computed
        for record in records:
            with self._error_isolation.guard("the metrics of a request"):
                self._metrics.observe(record)
                self._latencies.append(record.latency)

    def note_failed_step(self) -> None:
        """Record a step that has failed."""
        self.is_healthy = False
        with self._error_isolation.guard("the count of failed steps"):
            self._metrics.step_failures.inc()

    def note_lost_ranks(self, error: RankError) -> None:
        """End all requests: nothing can be computed any more."""
        if self.lost_ranks is None:
            self.lost_ranks = error
            self.is_healthy = False
            self.give_up(engine_fault(error))
            self.on_lost_ranks()

    def deliver(self, requests: Sequence[EngineRequest]) -> None:
        """Update these handles; a shared client delivers requests of other code, too. An error ends its request."""
        for handle in requests:
            if not isinstance(handle, RequestHandle) or handle not in self._living:
                continue
            group = self._living[handle]
            try:
                self._take(handle)
                group.changed.set()
            except Exception as error:
                self._living[handle] = group
                self._fail(handle, error)

    def _take(self, handle: RequestHandle) -> None:
        while handle.updates:
            handle.take(handle.updates.popleft())
        if not handle.record.done():
            return
        error = handle.step_error or handle.record.exception()
        if error is not None:
            handle.error = engine_fault(error)
        else:
            handle.result = record = handle.record.result()
            if handle.inputs.params.enable_prefix_caching:
                self.recent.note(record, handle.inputs.params.cache_salt)
            if record.status is Status.COMPLETED:
                with self._error_isolation.guard("the memory of answers"):
                    self._living[handle].on_result(record)
        self._forget([handle])

    def _fail(self, handle: RequestHandle, error: Exception) -> None:
        """End a request whose delivery has failed, in the engine as well."""
        if handle in self._living:
            self._error_isolation.note("a delivery", error)
            self._end([handle], engine_fault(error))

    def _forget(self, handles: Iterable[RequestHandle]) -> None:
        for handle in handles:
            self._living.pop(handle, None)
        for sender, have_ended in self._waiting:
            if not self._has_others(sender):
                have_ended.set()
