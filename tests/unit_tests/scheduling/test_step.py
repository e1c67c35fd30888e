"""The message of a step: plain, frozen, equal for schedulers that were given the same commands."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from collections.abc import Iterator

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import LogitsOptions, ScheduledStep, describe_step
from tests.unit_tests.scheduling.builders import make_limits, request_of
from tests.unit_tests.support.source import ROOT


def hybrid_scheduler(**limits: object) -> Scheduler:
    return Scheduler(make_limits(**limits), EvictionPolicyName.LRU, b"model", slots=3)


def schedule(scheduler: Scheduler) -> ScheduledStep:
    plan = scheduler.schedule()
    message = describe_step(plan.chunks, scheduler.limits.block_size)
    scheduler.commit(message, {one.request_id: 7 for one in message.chunks if one.sampling is not None})
    scheduler.check()
    return message


def test_end_tokens_are_forbidden_until_min_tokens():
    scheduler = hybrid_scheduler()
    scheduler.add(request_of(0, range(5), end=3, num_tokens_to_generate=4, min_tokens=2))
    assert [schedule(scheduler).chunks[0].sampling.forbidden for _ in range(3)] == [(3,), (3,), ()]


@pytest.mark.parametrize(("prompt", "ruled_out"), [(2, []), (1, [6]), (0, [6])])
def test_bad_words_are_looked_for_in_the_answer(prompt, ruled_out):
    """SA-1: a word whose first token ends the prompt may still begin there."""
    assert LogitsOptions(RequestParams(), array("I", (4, 5)), prompt, ((5, 6),)).ruled_out == ruled_out


def test_a_repeated_step_draws_the_same_number():
    """A forward that failed and is tried again."""
    scheduler = hybrid_scheduler()
    scheduler.add(request_of(0, range(5), temperature=1.0, num_tokens_to_generate=2))
    numbers = []
    for _ in range(2):
        plan = scheduler.schedule()
        numbers.append(describe_step(plan.chunks, 4).chunks[0].sampling.uniform)
        scheduler.abandon(plan.chunks, "the device is gone")
    assert numbers[0] == numbers[1]


def play(seed: int) -> Iterator[ScheduledStep]:
    """Random commands: requests that share prefixes, aborts, resets; the same for the same seed."""
    source = random.Random(seed)
    scheduler = hybrid_scheduler(total_blocks=20, max_tokens=9)
    requests = []
    for arrival in range(12):
        tokens = [*range(source.choice([0, 4, 8, 13])), *(100 + source.randrange(3) for _ in range(6))]
        params = {"num_tokens_to_generate": source.randrange(1, 5), "temperature": source.choice([0.0, 1.0])}
        requests.append(request_of(arrival, tokens, top_k=5, **params))
        scheduler.add(requests[-1])
        for _ in range(source.randrange(3)):
            yield schedule(scheduler)
        if source.random() < 0.3 and not requests[-1].is_ended:
            scheduler.end(requests[-1], Outcome(Status.ABORTED))
        if source.random() < 0.1:
            scheduler.reset_prefix_cache()
    while len(scheduler.queues):
        yield schedule(scheduler)


def test_two_schedulers_given_the_same_commands_write_equal_messages():
    """Messages are equal in processes that hash differently (KV-7: ranks rely on it)."""
    code = "from tests.unit_tests.scheduling.test_step import play; print(repr([list(play(s)) for s in range(5)]))"
    outputs = []
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 1000
