"""Passes over a list of prompts: times of submission, and the records of all requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ext.config import RunConfig
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.result import StepOutput
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.errors import ConfigError
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request_inputs import RequestInputs

_LONGEST_SLEEP = 0.1  # seconds


@dataclass(frozen=True)
class Pass:
    """One pass over the prompts: records in order of submission, seconds (zero if it never began), and the steps."""

    records: tuple[RequestRecord, ...]
    seconds: float
    steps: StepCounts = field(default_factory=StepCounts)

    @property
    def throughput(self) -> float:
        """Generated tokens a second; zero for a pass that never began."""
        return sum(len(record.generated_tokens) for record in self.records) / self.seconds if self.seconds else 0.0


def check_schedule(run: RunConfig, prompt_count: int) -> None:
    """Check that the batches fit the prompts.

    Raises:
        ConfigError: A batch would start after the last prompt.
    """
    beyond = [index for index in run.batch_boundaries if index >= prompt_count]
    if beyond:
        raise ConfigError(
            f"--batch-boundaries {beyond[0]}: with {prompt_count} prompts indices go up to {prompt_count - 1}"
        )


def run_passes(
    engine: LLMEngine,
    prompts: Sequence[RequestInputs],
    run: RunConfig,
    on_step: Callable[[StepOutput], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Pass]:
    """Run the prompts `run.inference_repeat_n` times, pass after pass; request ids continue across passes.

    Args:
        engine: Engine without requests; it does not step by itself.
        prompts: At least one prompt.
        run: Schedule of the submissions.
        on_step: Called after each step with its output.
        is_stopped: Polled between steps. Once it returns True, running and unsubmitted requests of all passes are
            aborted: every request has a record with its output so far.
    """
    passes = []
    for _ in range(run.inference_repeat_n):
        one = _PassRun(engine, prompts, run, on_step)
        _, before = engine.counts()
        start = time.monotonic()
        seconds = 0.0
        if not is_stopped():
            one.run(is_stopped)
            seconds = time.monotonic() - start
        if is_stopped():
            one.abort()
        passes.append(Pass(one.records(), seconds, engine.counts()[1] - before))
    return passes


class _PassRun:
    """One pass: submit in order, step, and collect the records."""

    def __init__(
        self, engine: LLMEngine, prompts: Sequence[RequestInputs], run: RunConfig, on_step: Callable[[StepOutput], None]
    ) -> None:
        self._engine, self._client = engine, engine.client
        self._prompts = prompts
        self._run = run
        self._on_step = on_step
        self._requests: list[EngineRequest] = []  # submitted so far
        self.steps = 0

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Submit and step until every request has ended, or until the pass is stopped."""
        start = time.monotonic()
        rounds = 0
        while not is_stopped():
            elapsed, busy = time.monotonic() - start, self._client.is_busy
            due = _due(self._run, len(self._prompts), len(self._requests), rounds=rounds, seconds=elapsed, busy=busy)
            while len(self._requests) < due:
                self._submit()
            if self._client.is_busy:
                self._step()
                if self._run.suspend_resume_interval and self.steps % self._run.suspend_resume_interval == 0:
                    self._engine.suspend()
                    self._engine.resume()
            elif len(self._requests) == len(self._prompts):
                return
            elif self._run.arrival_rate:
                until_next = len(self._requests) / self._run.arrival_rate - elapsed
                time.sleep(min(max(0.0, until_next), _LONGEST_SLEEP))  # a signal does not go unnoticed
            rounds += 1

    def abort(self) -> None:
        """Abort all requests, unsubmitted ones after submission, so that each has a record."""
        self._client.abort(request for request in self._requests if not request.record.done())
        while len(self._requests) < len(self._prompts):
            self._client.abort([self._submit()])
        while self._client.is_busy:  # a step without work reports the aborted requests
            self._step()

    def records(self) -> tuple[RequestRecord, ...]:
        """Return the records in order of submission."""
        return tuple(request.record.result() for request in self._requests)

    def _submit(self) -> EngineRequest:
        request = EngineRequest(self._prompts[len(self._requests)])
        self._client.submit([request]).result()
        self._requests.append(request)
        return request

    def _step(self) -> None:
        output = self._client.step()
        self.steps += 1
        self._on_step(output)


def _due(run: RunConfig, total: int, submitted: int, *, rounds: int, seconds: float, busy: bool) -> int:
    """Return the number of prompts, of `total`, that should have been submitted by now, at least `submitted`.

    Args:
        run: Rules of arrival: in batches, a number per step, a rate, or all at the start.
        total: Number of prompts of the run.
        submitted: Number of prompts submitted so far.
        rounds: Number of turns of the loop so far; each submits prompts, then runs a step if there is work.
        seconds: Time since the start.
        busy: Whether any submitted prompt is unfinished.
    """
    if run.drain_between_batches:
        starts = [index for index in run.batch_boundaries if index > submitted]
        return submitted if busy else min([*starts, total])
    if run.incoming_requests_per_step:
        return min(total, (rounds + 1) * run.incoming_requests_per_step)
    if run.arrival_rate:
        return min(total, 1 + int(seconds * run.arrival_rate))
    return total
