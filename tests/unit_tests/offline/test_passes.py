"""Submission times of prompts, and the order of records: as submitted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.engine.result import StepOutput
from megatron_ext.errors import ConfigError
from megatron_ext.offline.passes import check_schedule, run_passes
from megatron_ext.scheduling.request_inputs import RequestInputs

PROMPTS = [RequestInputs((1, 2, 3), RequestParams())] * 4


def run(engine, **settings) -> tuple[list, list[int]]:
    """The passes, and after each step how many requests had ended."""
    seen: list[int] = []

    def after_step(output: StepOutput) -> None:
        seen.append((seen[-1] if seen else 0) + len(output.records))

    return run_passes(engine, PROMPTS, RunConfig(**settings), after_step), seen


def test_all_at_once(fake_engine):
    (one,), seen = run(fake_engine)
    assert fake_engine.log == ["add 0", "add 1", "add 2", "add 3", "step", "step"]
    assert [record.request_id for record in one.records] == [0, 1, 2, 3]
    assert seen == [0, 4]


def test_some_each_step(fake_engine):
    run(fake_engine, incoming_requests_per_step=2)
    assert fake_engine.log == ["add 0", "add 1", "step", "add 2", "add 3", "step", "step"]


@pytest.mark.parametrize("boundaries", [(0, 1, 3), (1, 3)])
def test_a_batch_waits_for_all_before_it(fake_engine, boundaries):
    run(fake_engine, drain_between_batches=True, batch_boundaries=boundaries)
    steps = ["step", "step"]
    assert fake_engine.log == ["add 0", *steps, "add 1", "add 2", *steps, "add 3", *steps]


def test_suspended_and_resumed_every_so_many_steps(fake_engine):
    """Requests 2 and 3 are in the middle of their life then."""
    run(fake_engine, incoming_requests_per_step=2, suspend_resume_interval=2)
    assert fake_engine.log == ["add 0", "add 1", "step", "add 2", "add 3", "step", "suspend", "resume", "step"]


def test_some_each_second(fake_engine, monkeypatch):
    """Arrivals follow the clock, also while the engine has nothing to do."""
    clock = [0.0]
    own_time = SimpleNamespace(monotonic=lambda: clock[0])  # other threads use the module of the process
    own_time.sleep = lambda seconds: clock.__setitem__(0, clock[0] + seconds + 1e-9)
    monkeypatch.setattr("megatron_ext.offline.passes.time", own_time)
    run(fake_engine, incoming_requests_per_sec=2.0)
    assert fake_engine.log == [line for i in range(4) for line in (f"add {i}", "step", "step")]
    assert clock[0] == pytest.approx(1.5)


def test_repeats_go_on_counting(fake_engine):
    passes, seen = run(fake_engine, inference_repeat_n=2)
    assert [[record.request_id for record in one.records] for one in passes] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert fake_engine.log.index("add 4") > max(i for i, line in enumerate(fake_engine.log[:6]) if line == "step")
    assert seen == [0, 4, 4, 8]
    assert [one.steps.steps for one in passes] == [2, 2]


def test_batches_must_lie_within_the_prompts():
    check_schedule(RunConfig(drain_between_batches=True, batch_boundaries=(0, 3)), prompt_count=4)
    with pytest.raises(ConfigError, match="--batch-boundaries 4: with 4 prompts indices go up to 3"):
        check_schedule(RunConfig(drain_between_batches=True, batch_boundaries=(0, 4)), prompt_count=4)
