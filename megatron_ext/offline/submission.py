"""Runs a list of prompts through an engine: when each is submitted, and what comes back."""

from __future__ import annotations

import time
from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.offline.prompts import TokenizedPrompt
from megatron_ext.scheduling.record import RequestRecord

StepReport = Mapping[str, Any]
_LONGEST_SLEEP = 0.1  # seconds


class Engine(Protocol):
    """What this module uses of an engine."""

    def add_request(
        self, request_id: int, prompt: Sequence[int], params: RequestParams, *, prompt_text: str | None, turn: int
    ) -> Future[RequestRecord]:
        """Queue a request. A request that can never be served gets a record of status FAILED.

        Requests of the same turn are served by the same replica, where there are several.
        """

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or report anything."""

    def step_modern(self) -> StepReport:
        """Run one step.

        Returns:
            Among others `active_request_ids`, and `finished_request_records` of all that ended since the last step.
        """

    def abort_request(self, request_id: int) -> None:
        """End a living request, or one that has ended and is still to be reported; the next step reports it."""

    def idle(self) -> None:
        """There is nothing to do for now."""

    def suspend(self) -> None:
        """Free the pools; living requests keep their tokens and wait."""

    def resume(self) -> None:
        """Allocate the pools again."""


@dataclass(frozen=True)
class Pass:
    """The prompts, once: their records in order of submission, the seconds and the engine's steps it took."""

    records: tuple[RequestRecord, ...]
    seconds: float
    steps: int = 0

    @property
    def throughput(self) -> float:
        """Generated tokens a second; zero for a pass that never began."""
        return sum(len(record.generated_tokens) for record in self.records) / self.seconds if self.seconds else 0.0


def check_schedule(run: RunConfig, prompt_count: int) -> None:
    """See that the batches fit the prompts.

    Raises:
        ConfigError: If a batch would start behind the last prompt.
    """
    beyond = [index for index in run.batch_boundaries if index >= prompt_count]
    if beyond:
        raise ConfigError(
            f"--batch-boundaries {beyond[0]}: there are {prompt_count} prompts, so indices go up to {prompt_count - 1}"
        )


def run_passes(
    engine: Engine,
    prompts: Sequence[TokenizedPrompt],
    run: RunConfig,
    on_step: Callable[[StepReport], None],
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[Pass]:
    """Run the prompts `run.inference_repeat_n` times, one pass after the other; request ids go on counting.

    Args:
        engine: Without unfinished requests.
        prompts: At least one.
        run: When to submit what.
        on_step: Called after each step with what it returned.
        is_stopped: Asked between steps. Once it says so, what runs and what is still to be submitted, in this pass and
            in those to come, is aborted: every request has a record, with what it has.
    """
    passes = []
    for index in range(run.inference_repeat_n):
        one = _PassRun(engine, prompts, run, index * len(prompts), on_step)
        start = time.monotonic()
        seconds = 0.0
        if not is_stopped():
            one.run(is_stopped)
            seconds = time.monotonic() - start
        if is_stopped():
            one.abort()
        passes.append(Pass(one.records(), seconds, one.steps))
    return passes


class _PassRun:
    """One pass: submits in order, steps, and keeps the records of what has ended.

    Attributes:
        steps: So far.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[TokenizedPrompt],
        run: RunConfig,
        first_id: int,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._run = run
        self._first_id = first_id
        self._on_step = on_step
        self._submitted = 0
        self.steps = 0
        self._records: dict[int, RequestRecord] = {}

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Submit and step until every request has ended, or until it is stopped."""
        start = time.monotonic()
        rounds = 0
        while not is_stopped():
            elapsed, busy = time.monotonic() - start, self._engine.has_unfinished_requests()
            due = _due(self._run, len(self._prompts), self._submitted, rounds=rounds, seconds=elapsed, busy=busy)
            while self._submitted < due:
                self._submit()
            if self._engine.has_unfinished_requests():
                self._step()
                if self._run.suspend_resume_interval and self.steps % self._run.suspend_resume_interval == 0:
                    self._engine.suspend()
                    self._engine.resume()
            elif self._submitted == len(self._prompts):
                return
            elif self._run.arrival_rate:
                self._engine.idle()
                self._sleep(self._submitted / self._run.arrival_rate - elapsed)
            rounds += 1

    def abort(self) -> None:
        """End what runs, and what was to be submitted: the engine has each, so each has a record like the others."""
        for request_id in range(self._first_id, self._first_id + self._submitted):
            if request_id not in self._records:
                self._engine.abort_request(request_id)
        while self._submitted < len(self._prompts):
            self._engine.abort_request(self._submit())
        while self._engine.has_unfinished_requests():  # a step without anything to compute reports them
            self._step()

    def records(self) -> tuple[RequestRecord, ...]:
        """In order of submission."""
        return tuple(self._records[self._first_id + index] for index in range(len(self._prompts)))

    def _submit(self) -> int:
        turn = self._submitted  # of each pass anew, so that a prompt meets its own prefix again
        prompt, request_id = self._prompts[turn], self._first_id + turn
        self._engine.add_request(request_id, prompt.tokens, prompt.params, prompt_text=prompt.text, turn=turn)
        self._submitted += 1
        return request_id

    def _step(self) -> None:
        report = self._engine.step_modern()
        self.steps += 1
        self._records |= {record.request_id: record for record in report["finished_request_records"]}
        self._on_step(report)

    @staticmethod
    def _sleep(seconds: float) -> None:
        """Until the next arrival, but not so long that a signal goes unnoticed."""
        time.sleep(min(max(0.0, seconds), _LONGEST_SLEEP))


def _due(run: RunConfig, total: int, submitted: int, *, rounds: int, seconds: float, busy: bool) -> int:
    """How many of `total` prompts are to have been submitted by now, `submitted` or more."""
    if run.drain_between_batches:
        starts = [index for index in run.batch_boundaries if index > submitted]
        return submitted if busy else min([*starts, total])
    if run.incoming_requests_per_step:
        return min(total, (rounds + 1) * run.incoming_requests_per_step)
    if run.arrival_rate:
        return min(total, 1 + int(seconds * run.arrival_rate))
    return total
