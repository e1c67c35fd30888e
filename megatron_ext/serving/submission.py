"""Runs a list of prompts through an engine: when each is submitted, and what comes back."""

from __future__ import annotations

import time
from asyncio import Future
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.serving.prompts import Prompt


class Engine(Protocol):
    """What this module uses of an engine."""

    def add_request(self, request_id: int, prompt: str | list[int], params: RequestParams) -> Future[RequestRecord]:
        """Queue a request. A request that can never be served gets a record of status FAILED."""

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or report anything."""

    def step_modern(self) -> dict[str, Any]:
        """Run one step. The futures of requests that end with it are done when it returns."""

    def suspend(self) -> None:
        """Free the pools; living requests keep their tokens and wait."""

    def resume(self) -> None:
        """Allocate the pools again."""


@dataclass(frozen=True)
class Pass:
    """The prompts, once: their records in order of submission, and the seconds it took."""

    records: tuple[RequestRecord, ...]
    seconds: float

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return sum(len(record.generated_tokens) for record in self.records) / self.seconds


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


def run_passes(engine: Engine, prompts: Sequence[Prompt], run: RunConfig, on_step: Callable[[int], None]) -> list[Pass]:
    """Run the prompts `run.inference_repeat_n` times, one pass after the other; request ids go on counting.

    Args:
        engine: Without unfinished requests.
        prompts: At least one.
        run: When to submit what.
        on_step: Called after each step with the number of requests that have ended so far, over all passes.
    """
    passes: list[Pass] = []
    for index in range(run.inference_repeat_n):
        first_id = index * len(prompts)
        passes.append(_run_pass(engine, prompts, run, first_id, lambda done, base=first_id: on_step(base + done)))
    return passes


def _run_pass(
    engine: Engine, prompts: Sequence[Prompt], run: RunConfig, first_id: int, on_step: Callable[[int], None]
) -> Pass:
    futures: list[Future[RequestRecord]] = []
    start = time.monotonic()
    rounds = steps = 0
    while True:
        elapsed, busy = time.monotonic() - start, engine.has_unfinished_requests()
        due = _due(run, len(prompts), len(futures), rounds=rounds, seconds=elapsed, busy=busy)
        for prompt in prompts[len(futures) : due]:
            content = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
            futures.append(engine.add_request(first_id + len(futures), content, prompt.params))
        if engine.has_unfinished_requests():
            engine.step_modern()
            steps += 1
            if run.suspend_resume_interval and steps % run.suspend_resume_interval == 0:
                engine.suspend()
                engine.resume()
            on_step(sum(future.done() for future in futures))
        elif len(futures) == len(prompts):
            break
        elif run.incoming_requests_per_sec:
            time.sleep(max(0.0, len(futures) / run.incoming_requests_per_sec - elapsed))
        rounds += 1
    on_step(len(futures))
    return Pass(tuple(future.result() for future in futures), time.monotonic() - start)


def _due(run: RunConfig, total: int, submitted: int, *, rounds: int, seconds: float, busy: bool) -> int:
    """How many of `total` prompts are to have been submitted by now, `submitted` or more."""
    if run.drain_between_batches:
        starts = [index for index in run.batch_boundaries if index > submitted]
        return submitted if busy else min([*starts, total])
    if run.incoming_requests_per_step:
        return min(total, (rounds + 1) * run.incoming_requests_per_step)
    if run.incoming_requests_per_sec:
        return min(total, 1 + int(seconds * run.incoming_requests_per_sec))
    return total
