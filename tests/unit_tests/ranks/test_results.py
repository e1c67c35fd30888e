"""MR-2, SA-5: rank 0 hears what only the rank that samples can know of a request: scores, and forms that are lost."""

from __future__ import annotations

import pickle

import pytest

from megatron_ext.ranks import results
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from tests.unit_tests.scheduling.builders import make_limits, request_of


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"presence_penalty": 1.0}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"return_log_probs": True, "skip_prompt_log_probs": True}, True),
    ],
    ids=str,
)
def test_what_rank_0_waits_for(fields, expected):
    """And the message, which has all that a row's logits are shaped with, is the same on every rank."""
    steps = []
    for _ in range(2):
        scheduler = Scheduler(make_limits())
        scheduler.add(request_of(0, range(5), num_tokens_to_generate=3, **fields))
        steps.append(describe_step(scheduler.schedule().chunks, scheduler.limits.block_size))
    assert results._wants_scores(steps[0]) == expected
    assert steps[0] == steps[1] == pickle.loads(pickle.dumps(steps[0]))
