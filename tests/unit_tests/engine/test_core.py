"""Engine core over a simulated device: new weights, suspends, the cache on disk, and the log of steps."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_ext.engine.executor import ModelResources
from megatron_ext.engine.step_log import LINE_SECONDS, StepLog
from megatron_ext.errors import WeightUpdateError
from tests.unit_tests.support.paper_engine import Paper


def test_weights_that_others_have_changed_are_noticed_without_a_cache():
    """RL-2: tokens of the next step are of a new version."""
    paper = Paper(policy=None)
    paper.engine.resources = resources = ModelResources()
    paper.add(0, (1, 2, 3), ignore_eos=True)
    paper.step()
    resources.has_new_weights = iter([True, *[False] * 100]).__next__
    paper.run()
    assert [version for version, _ in paper.records[0].weights_version] == [0, 1]


def add_samples(paper: Paper, count: int) -> None:
    """Add samples of one prompt, which its first step computes once."""
    for request_id in range(count):
        drawn = {"temperature": 0.8, "seed": request_id}
        paper.add(request_id, tuple(range(6)), group=0, num_tokens_to_generate=4, ignore_eos=True, **drawn)


@pytest.mark.parametrize("slots", [None, 50])
def test_samples_of_a_prompt_rest_on_the_same_weights(slots):
    """RL-2: those that take over a prompt, too, are told the version of the weights that computed it."""
    paper = Paper(slots=slots)
    paper.engine.weights_changed(version=7)
    add_samples(paper, 3)
    paper.run()
    paper.check_tokens()
    assert [paper.records[one].skipped_prefill_token_count for one in range(3)] == [0, 6, 6]
    for record in paper.records.values():
        assert record.weights_version == record.prefix_weights_version == ((7, 4),)


def test_a_step_reports_every_request_that_it_has_given_a_token():
    """KV-6: samples that take over a prompt are active from the step that draws their first token."""
    paper = Paper()
    add_samples(paper, 3)
    output = paper.engine.step()
    assert [(one.request_id, one.generated_count) for one in output.active] == [(0, 1), (1, 1), (2, 1)]


def test_only_a_complete_update_ends_a_failed_one():
    """RL-1: after an update of part of the weights they are of no version still."""
    paper = Paper()

    def write() -> None:
        raise WeightUpdateError("no memory", is_restored=False)

    with pytest.raises(WeightUpdateError):
        paper.engine.change_weights(write)
    paper.engine.weights_changed(is_complete=False)
    with pytest.raises(WeightUpdateError):
        paper.engine.check_weights()
    assert paper.engine.update_error is not None
    paper.engine.weights_changed()
    paper.engine.check_weights()


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_write_that_fails(is_restored):
    """RL-1: without the old weights nothing is served, and with them everything is; the version stays."""
    paper = Paper()

    def write() -> None:
        raise WeightUpdateError("no memory", is_restored=is_restored)

    paper.add(0, (1, 2, 3))
    with pytest.raises(WeightUpdateError):
        paper.engine.change_weights(write, version=7)
    assert (paper.engine.update_error is None) is is_restored
    assert paper.engine.weights_version == 0
    assert paper.engine.change_weights(lambda: "written", version=8) == "written"
    assert (paper.engine.update_error, paper.engine.weights_version) == (None, 8)


def test_a_core_that_is_given_up_keeps_its_cache_on_disk():
    """EX-11: as one that is closed does."""
    paper, kept = Paper(), []
    paper.engine.disk = SimpleNamespace(keep=lambda: kept.append("cache"))
    paper.engine.cancel()
    assert kept == ["cache"]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_offloaded_pools_are_back_before_the_cache_is_written(end, monkeypatch):
    """DC-1, RL-6: their tensors have no memory until then."""
    paper, calls = Paper(), []
    paper.engine.disk = SimpleNamespace(keep=lambda: calls.append("keep"), abandon=lambda: calls.append("abandon"))
    monkeypatch.setattr(paper.engine.resources, "allocate", lambda: calls.append("allocate"))
    paper.engine.suspend("offload")
    getattr(paper.engine, end)()
    assert calls[:2] == ["allocate", "keep"]


@pytest.mark.parametrize(("level", "is_kept"), [("keep", True), ("offload", True), ("drop", False)])
def test_a_suspend_keeps_the_cache_with_the_pools(level, is_kept):
    """RL-6: only dropped entries are computed again."""
    paper = Paper()
    paper.add(0, tuple(range(9)), num_tokens_to_generate=20, ignore_eos=True)
    for _ in range(3):
        paper.step()
    paper.engine.suspend(level)
    if not is_kept:
        paper.device.lose_pools()
    paper.engine.resume()
    paper.run()
    paper.check_tokens()
    assert (paper.records[0].recomputed_token_count == 0) is is_kept


def test_time_without_requests_is_no_work_in_the_log(caplog):
    """KV-10: it leads to no line, and a line tells the seconds of work."""
    caplog.set_level("INFO", "megatron_ext.engine.step_log")
    paper = Paper()
    times: list[float] = []
    paper.engine.step_log = StepLog(None, lambda: times.pop(0))
    for start in (0.0, 1000.0):  # both requests take half of the time of a line
        times[:] = [start, start + LINE_SECONDS / 2]
        paper.add(0, (1, 2, 3), num_tokens_to_generate=2, ignore_eos=True)
        for _ in range(2):
            engine_step = paper.engine.compute()
            paper.engine.report(dataclasses.replace(engine_step, seconds=0.0))
    (line,) = caplog.messages
    assert f"{LINE_SECONDS} s of work" in line
