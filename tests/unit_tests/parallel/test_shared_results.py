"""MR-2, SE-10: rank 0 receives the scores of a request, which only the sampling rank has."""

from __future__ import annotations

import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.engine.result import StepResult
from megatron_ext.parallel import shared_results
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep, describe_step
from tests.unit_tests.scheduling.builders import make_limits, request_of


def test_target_tokens_reach_their_requests(monkeypatch: pytest.MonkeyPatch):
    """MR-2, SP-5: two requests with drafts in one step, and one without, on two ranks."""
    draws = Sampling(1.0, 0, 0.0, None, (), None)
    chunks = tuple(
        ScheduledChunk(name, (5,) * (1 + drafts), 8, 9 + drafts, True, (0,), 0, row, sampling=draws)
        for row, (name, drafts) in enumerate([(30, 2), (10, 0), (20, 3)])
    )
    chunks = tuple(dataclasses.replace(one, target_sampling=(draws,) * (one.length - 1)) for one in chunks)
    step = ScheduledStep(chunks, 3)
    sampled = StepResult({30: 1, 10: 2, 20: 3}, {}, {}, {}, target_tokens={30: (11, 12), 20: (21, 22, 23)})
    sent: list[torch.Tensor] = []

    def broadcast(row: torch.Tensor, source: int, group: object) -> None:
        sent.append(row.clone())
        row.copy_(sent[0])

    monkeypatch.setattr(shared_results, "broadcast", broadcast)
    pair = SimpleNamespace(size=lambda: 2)
    source, follower = (shared_results.SharedExecutor(None, pair, rank, source=0) for rank in (0, 1))
    for got in (source.share(step, sampled), follower.share(step, StepResult())):
        assert (got.tokens, got.target_tokens) == (sampled.tokens, sampled.target_tokens)
    assert sent[1].shape == sent[0].shape


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"presence_penalty": 1.0}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"return_log_probs": True, "skip_prompt_log_probs": True}, True),
    ],
    ids=str,
)
def test_results_that_rank_0_waits_for(fields, expected):
    """Messages with the logits options of a row are equal on every rank."""
    steps = []
    for _ in range(2):
        scheduler = Scheduler(make_limits())
        request = request_of(0, range(5), num_tokens_to_generate=3, **fields)
        scheduler.add(request)
        scheduler.allow(request, (b"\7\0\0\0",))
        steps.append(describe_step(scheduler.schedule().chunks, scheduler.limits.block_size))
    assert len(steps[0].chunks) == 1
    assert shared_results._wants_scores(steps[0]) == expected
    assert steps[0] == steps[1] == pickle.loads(pickle.dumps(steps[0]))
