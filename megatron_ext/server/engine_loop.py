"""The engine beside an event loop: one thread steps it, and everything else happens between two steps.

A step blocks, so it runs in a thread. The engine is not made for two threads, so *every* call of it runs in that same
thread, in the order of submission: an abort that arrives during a step takes effect when the step ends, before the next
one is planned. What the event loop sees of a request are values that the engine thread made for it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from megatron_ext.engine.faults import Faults
from megatron_ext.errors import RankError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.engine_side import EngineSide, StepOutcome
from megatron_ext.server.errors import ApiError, asleep, engine_fault, overloaded, shutting_down
from megatron_ext.server.exchange import HttpExchange
from megatron_ext.server.metrics import Metrics
from megatron_ext.server.progress import RequestHandle
from megatron_ext.server.recent import RecentRequests
from megatron_ext.server.sampling import Job
from megatron_ext.stepping.progress import Update
from megatron_ext.stepping.thread import FAILED_STEPS, EngineThread

Result = TypeVar("Result")

LATENCIES = 32  # of the last requests; how long a new one will take, roughly
LONGEST_RETRY = 60  # seconds


class EngineLoop:
    """Steps the engine as long as there are requests.

    A step that fails is tried again. What fails beside it ends the requests that it concerns, or nobody; the loop goes
    on, and counts it.

    Args:
        engine: Nobody else may touch it from now on.
        metrics: Told what happens.
        max_waiting: Requests that may be here beyond those that the batch has room for.

    Attributes:
        recent: Requests that have ended, for who asks what their trace was.
    """

    def __init__(self, engine: InferenceEngine, metrics: Metrics, max_waiting: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self.capacity = engine.context.max_requests * engine.engine.replicas + max_waiting
        self._thread = EngineThread(engine)
        self._exchanges: dict[int, tuple[RequestHandle, HttpExchange]] = {}  # by request id
        self._ids = itertools.count()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._lost_ranks: RankError | None = None
        self.on_lost_ranks: Callable[[], None] = lambda: None
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self.recent = RecentRequests()
        self._is_closed = False
        self._has_more = False  # in the engine, as of the last step
        self._failures = 0  # steps, in a row
        self._faults = Faults("the server")  # the event loop's own; what the engine thread meets counts with the engine
        self.is_healthy = True  # until a step fails, and again when one has computed something
        self._side = EngineSide(engine, metrics)  # the engine thread's own
        self._awake = asyncio.Event()  # no step begins while it is not set
        self._awake.set()
        self._falling_asleep = asyncio.Lock()  # and waking up

    def start(self) -> None:
        """Begin to step."""
        self._metrics.state = self._engine.statistics()
        create_task = asyncio.get_running_loop().create_task
        self._tasks = [create_task(self._run())]
        if self._engine.engine.heartbeat is not None:
            self._tasks.append(create_task(self._keep_in_touch(self._engine.engine.heartbeat)))

    async def stop(self) -> None:
        """Give up what is left, and wait for the step in flight."""
        self.give_up(shutting_down())
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        try:
            await self.call(self._engine.close)
        except RankError as error:
            self._note_lost_ranks(error)
        await asyncio.to_thread(self._thread.close)

    @property
    def error_count(self) -> int:
        """What has gone wrong since the start: failed steps, and everything that a request or nobody paid for."""
        return self._faults.count + self._engine.faults.count

    @property
    def living(self) -> int:
        """Requests that have not ended."""
        return len(self._exchanges)

    async def submit(self, jobs: Sequence[Job], *, is_streamed: bool) -> HttpExchange:
        """Hand requests to the engine, all or none.

        Raises:
            ApiError: The queue is full (429); the server is asleep or shutting down (503).
            ConfigError: A prompt or setting that makes no sense.
        """
        self._check_room(len(jobs))
        exchange = HttpExchange([RequestHandle(next(self._ids), job) for job in jobs], is_streamed, self.abort)
        for handle in exchange.handles:
            self._exchanges[handle.request_id] = handle, exchange
        self._work.set()
        try:
            added = self._thread.submit_requests(self._side.add, (exchange,), self._side.observed)
            await asyncio.wrap_future(added)
        except Exception:
            self._forget(exchange.handles)
            raise
        except BaseException:  # cancelled, and the engine may have taken them
            exchange.abort()
            raise
        return exchange

    def _check_room(self, count: int) -> None:
        if self._is_closed:
            raise shutting_down()
        if self.is_asleep:
            raise asleep()
        if self.living + count > self.capacity:
            self._metrics.rejected.inc(count)
            mean = sum(self._latencies) / len(self._latencies) if self._latencies else 1
            raise overloaded(self.living, self.capacity, min(LONGEST_RETRY, max(1, math.ceil(mean))))

    def abort(self, handles: Iterable[RequestHandle]) -> None:
        """Free at once, that is when the step in flight has ended, whatever these requests own."""
        ids = [handle.request_id for handle in handles]
        if ids and not self._is_closed:
            self._thread.submit(self._side.observed, self._side.abort, (ids,))

    def give_up(self, error: ApiError) -> None:
        """End all requests with an error."""
        self._end(list(self._exchanges.values()), error)

    def _end(self, ended: Sequence[tuple[RequestHandle, HttpExchange]], error: ApiError) -> None:
        self.abort(handle for handle, _ in ended)
        self._forget(handle for handle, _ in ended)
        if ended:  # a step closes the engine's books on them
            self._has_more = True
            self._work.set()
        for handle, exchange in ended:
            handle.error = error
            exchange.changed.set()

    def end(self, exchange: HttpExchange, error: ApiError) -> int:
        """End what has not ended of an exchange, with an error.

        Returns:
            How many requests that were.
        """
        ended = [handle for handle in exchange.handles if handle.request_id in self._exchanges]
        self._end([(handle, exchange) for handle in ended], error)
        return len(ended)

    async def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call something with the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._thread.submit(self._side.observed, function, arguments))

    async def reset_prefix_cache(self) -> dict[str, int] | None:
        """Empty the cache; what it holds then."""
        await self.call(self._engine.reset_prefix_cache)
        return await self.call(self._engine.prefix_cache_statistics)

    @property
    def is_asleep(self) -> bool:
        """Whether the pools' memory has been given back, or is about to be."""
        return not self._awake.is_set()

    async def sleep(self) -> None:
        """Give the pools' memory back when the step in flight has ended. Who is here waits; newcomers are refused."""
        async with self._falling_asleep:
            self._awake.clear()
            try:
                await self.call(self._engine.suspend)
            except Exception:
                self._awake.set()
                raise

    async def wake_up(self) -> None:
        """Allocate the pools again; who waits goes on. If that fails the server stays asleep."""
        async with self._falling_asleep:
            await self.call(self._engine.resume)
            self._awake.set()

    async def _run(self) -> None:
        while True:
            if not self._exchanges and not self._has_more:
                self._work.clear()
            await self._work.wait()
            if self.is_asleep:
                await self._awake.wait()
                continue
            try:
                outcome = await self.call(self._side.step)
            except RankError as error:
                self._note_lost_ranks(error)
                return
            except Exception as error:
                self._note_failed_step(error)
                continue
            self._failures = 0
            self.is_healthy = self.is_healthy or outcome.has_computed
            self._has_more = outcome.has_more
            try:
                self._deliver(outcome)
            except Exception as error:
                self._fail(outcome.request_ids, error)

    async def _keep_in_touch(self, seconds: float) -> None:
        """Other ranks wait for this one, and give it up after a while."""
        while self._lost_ranks is None:
            await asyncio.sleep(seconds / 2)
            try:
                await self.call(self._engine.idle)
            except RankError as error:
                self._note_lost_ranks(error)

    def _note_lost_ranks(self, error: RankError) -> None:
        """Nothing can be computed any more: whoever waits is told, and the server ends."""
        if self._lost_ranks is None:
            self._lost_ranks = error
            self.is_healthy = False
            self.give_up(engine_fault(error))
            self.on_lost_ranks()

    def raise_lost_ranks(self) -> None:
        """What ended the server, if it was no signal.

        Raises:
            RankError: Other ranks are lost.
        """
        if self._lost_ranks is not None:
            raise self._lost_ranks

    def _note_failed_step(self, error: Exception) -> None:
        """Its requests wait for the next one; after several in a row all are given up."""
        self._failures += 1
        self.is_healthy = self._has_more = False
        self._faults.note(f"an engine step, {self._failures} in a row,", error)
        with self._faults.absorbed("the count of failed steps"):
            self._metrics.step_failures.inc()
        if self._failures >= FAILED_STEPS:
            self.give_up(engine_fault(error))
            self._failures, self._has_more = 0, True  # one more step, to close the engine's books on them

    def _deliver(self, outcome: StepOutcome) -> None:
        for request_id, update in outcome.updates.items():
            self._hand_over(request_id, update)
        for record in outcome.records:
            self._hand_over(record.request_id, record)
            with self._faults.absorbed("the metrics of a request"):
                self._metrics.observe(record)
                self._latencies.append(record.latency)

    def _hand_over(self, request_id: int, update: Update | RequestRecord) -> None:
        """Let a handle have its update; what fails here ends this request only."""
        if request_id not in self._exchanges:
            return
        handle, exchange = self._exchanges[request_id]
        try:
            if isinstance(update, RequestRecord):
                handle.record = update
                self._forget([handle])
                if handle.job.params.enable_prefix_caching:
                    self.recent.note(update, handle.job.params.cache_salt)
            else:
                handle.take(update)
            exchange.changed.set()
        except Exception as error:
            self._exchanges[request_id] = handle, exchange
            self._fail([request_id], error)

    def _fail(self, request_ids: Iterable[int], error: Exception) -> None:
        """What was to be delivered to these requests is lost: they end with the error, in the engine too."""
        self._faults.note("a delivery", error)
        for request_id in request_ids:
            if request_id in self._exchanges:
                handle, exchange = self._exchanges[request_id]
                self._forget([handle])
                handle.error = engine_fault(error)
                self.abort([handle])
                exchange.changed.set()

    def _forget(self, handles: Iterable[RequestHandle]) -> None:
        for handle in handles:
            self._exchanges.pop(handle.request_id, None)
