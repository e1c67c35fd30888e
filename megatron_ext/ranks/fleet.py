"""The engines of rank 0: one for each replica, all stepping together, and everybody else told what they are told."""

from __future__ import annotations

import itertools
import time
from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter

from megatron_ext.config import RequestParams
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.faults import Faults, describe
from megatron_ext.engine.result import NO_STEP, Step, StepResult
from megatron_ext.engine.statistics import EngineStatistics, log_step
from megatron_ext.errors import RankError
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.ranks.commands import Action, Batch, Resume, StartAnew
from megatron_ext.ranks.journal import JournalledScheduler
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request


@dataclass(frozen=True)
class FleetStep:
    """A step of all replicas, as `Step` is of one."""

    parts: tuple[Step, ...]
    seconds: float

    @property
    def chunks(self) -> Sequence[Chunk]:
        """What was computed."""
        return [chunk for part in self.parts for chunk in part.chunks]

    @property
    def result(self) -> StepResult | None:
        """What that gave; None if nothing was computed."""
        results = [part.result for part in self.parts if part.result is not None]
        if not results:
            return None
        whole = StepResult({}, {}, {}, {})
        for one in results:
            whole.tokens.update(one.tokens)
            whole.generated.update(one.generated)
            whole.prompt.update(one.prompt)
            whole.failures.update(one.failures)
            whole.behind_drafts.update(one.behind_drafts)
            whole.generated_behind.update(one.generated_behind)
        return whole


class Fleet:
    """What `Engine` is to one rank, rank 0's engines are to all.

    The engine of replica 0 computes. Each of the others is a mirror: it plans what its replica plans, and its executor
    waits for the result. So everything about requests is known here, and texts are made here only.

    A batch with everything that was asked for since the last one goes to all ranks before each step. A step that fails
    anywhere is the end of all of it.

    Args:
        engines: By replica; without requests.
        schedulers: Of the engines.
        send: Hands a batch to all other ranks.
        heartbeat: Seconds after which they must have heard of rank 0.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        schedulers: Sequence[JournalledScheduler],
        send: Callable[[Batch], None],
        heartbeat: float,
    ) -> None:
        self.engines = tuple(engines)
        self._schedulers = tuple(schedulers)
        self.faults: Faults = self.engines[0].faults
        self.step_count = 0  # in which anything was computed
        self._send = send
        self.heartbeat = heartbeat
        self._sent_at = time.monotonic()
        self._turns = itertools.count()
        self._is_over = False
        for scheduler in self._schedulers:
            scheduler.note(StartAnew())

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return len(self.engines)

    # Requests come and go

    def tokenize(self, prompt: str | Sequence[int], add_bos: bool = False) -> tuple[int, ...]:
        """See `Intake.tokenize`."""
        return self.engines[0].tokenize(prompt, add_bos)

    def add(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        params: RequestParams,
        future: Future[RequestRecord],
        *,
        text: str | None = None,
        turn: int | None = None,
    ) -> None:
        """Queue a request at one of R replicas.

        Args:
            request_id: See `Engine.add`, as the rest.
            tokens: Of its prompt.
            params: How it is sampled.
            future: Of its record.
            text: Of the prompt.
            turn: It is served by the replica with this number, modulo R; by default requests take turns as they come.
        """
        self.check_free(request_id)
        chosen = (next(self._turns) if turn is None else turn) % len(self.engines)
        self.engines[chosen].add(request_id, tokens, params, future, text=text)

    def check_free(self, request_id: int) -> None:
        """See `Engine.check_free`."""
        for engine in self.engines:
            engine.check_free(request_id)

    def abort(self, request_id: int) -> bool:
        """See `Engine.abort`."""
        return self._owner(request_id).abort(request_id)

    def fail(self, request_id: int, error: Exception) -> None:
        """See `Engine.fail`."""
        self._owner(request_id).fail(request_id, error)

    def get(self, request_id: int) -> Request:
        """See `Engine.get`."""
        return self._owner(request_id).get(request_id)

    def _owner(self, request_id: int) -> Engine:
        for engine in self.engines:
            if request_id in engine.output:
                return engine
        raise KeyError(request_id)

    @property
    def is_busy(self) -> bool:
        """Whether a step would do or report anything."""
        return any(engine.is_busy for engine in self.engines)

    def cancel(self) -> None:
        """See `Engine.cancel`."""
        for engine in self.engines:
            engine.cancel()

    def waiting(self) -> Sequence[Request]:
        """See `Engine.waiting`."""
        return [request for engine in self.engines for request in engine.waiting()]

    # Steps

    @property
    def no_step(self) -> FleetStep:
        """In which nothing was planned."""
        return FleetStep((NO_STEP,) * len(self.engines), 0.0)

    def compute(self) -> FleetStep:
        """One step of all replicas.

        Raises:
            RankError: It failed somewhere, or an earlier one did.
        """
        started = time.perf_counter()
        for engine in self.engines:  # before the others are told what this step is given
            engine.propose()
        is_idle = not any(engine.has_other_work for engine in self.engines)
        for engine in self.engines:
            engine.prepare(1 / len(self.engines), is_idle=is_idle)
        self._tell(Action.STEP)
        try:
            parts = tuple(engine.compute(is_prepared=True) for engine in self.engines)
            step = FleetStep(parts, time.perf_counter() - started)
        except Exception as error:
            self._is_over = True
            raise _end_of_all(error) from error
        self.step_count += step.result is not None
        return step

    def _tell(self, action: Action) -> None:
        """One batch, with all that has been noted."""
        if self._is_over:
            raise RankError("the ranks have stopped stepping together; start anew")
        noted = tuple((i, command) for i, one in enumerate(self._schedulers) for command in one.take_journal())
        try:
            self._send(Batch(action, noted))
        except Exception as error:
            self._is_over = True
            raise _end_of_all(error) from error
        self._sent_at = time.monotonic()

    def report(self, step: FleetStep, logging_interval: int = 0) -> list[RequestRecord]:
        """See `Engine.report`."""
        pairs = zip(self.engines, step.parts, strict=True)
        records = [record for engine, part in pairs for record in engine.report(part)]
        if logging_interval and step.chunks and self.step_count % logging_interval == 0:
            with self.faults.absorbed("the log line of a step"):
                log_step(self.statistics(), step.chunks, step.seconds)
        return records

    def idle(self) -> None:
        """Let the other ranks hear of this one if they have not for a while: they wait no longer than a timeout."""
        if time.monotonic() - self._sent_at >= self.heartbeat:
            self._tell(Action.IDLE)

    def close(self) -> None:
        """The other ranks stop, unless they have stopped; no step follows."""
        if not self._is_over:
            self._tell(Action.STOP)
            self._is_over = True

    # Caches and pools

    def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        for engine in self.engines:
            engine.reset_prefix_cache()

    def weights_changed(self) -> None:
        """See `Engine.weights_changed`."""
        for engine in self.engines:
            engine.weights_changed()

    def suspend(self) -> None:
        """See `Engine.suspend`; the other ranks are told at once, since somebody waits for the memory."""
        for engine in self.engines:
            engine.suspend()
        self._tell(Action.IDLE)

    def resume(self) -> None:
        """See `Engine.resume`; the other ranks allocate their pools before the next step."""
        for scheduler in self._schedulers:
            scheduler.note(Resume())

    def hottest(self, count: int) -> list[CachedPrefix]:
        """See `Engine.hottest`; of all replicas."""
        found = [prefix for engine in self.engines for prefix in engine.hottest(count)]
        return nlargest(count, found, key=attrgetter("hits", "blocks"))

    # What there is

    @property
    def scheduler(self) -> JournalledScheduler:
        """That of replica 0, whose pools are here."""
        return self._schedulers[0]

    @property
    def is_caching(self) -> bool:
        """Whether anything is cached."""
        return self.engines[0].is_caching

    @property
    def counters(self) -> Counters:
        """Of all replicas together."""
        return Counters.total(engine.counters for engine in self.engines)

    @property
    def ended_count(self) -> int:
        """See `Engine.ended_count`."""
        return sum(engine.ended_count for engine in self.engines)

    def statistics(self) -> EngineStatistics:
        """Of all replicas together."""
        return EngineStatistics.total([engine.statistics() for engine in self.engines], steps=self.step_count)

    def check(self) -> None:
        """Assert every invariant of requests and pools."""
        for engine in self.engines:
            engine.check()


def _end_of_all(error: Exception) -> RankError:
    return error if isinstance(error, RankError) else RankError(describe(error))
