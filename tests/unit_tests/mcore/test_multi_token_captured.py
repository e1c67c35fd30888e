"""Drafts of multi-token prediction beside captured and recorded steps, which write hidden states for later drafts."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from megatron_ext.mcore.hidden_states import HiddenStates
from megatron_ext.mcore.multi_token_engine import PredictionLayerDrafter
from megatron_ext.ops import cpp
from megatron_ext.runner.cuda_graphs import buckets as sizes
from megatron_ext.runner.recorded_steps import RecordedSteps
from tests.unit_tests.mcore.test_multi_token_layers import WatchingLayers
from tests.unit_tests.runner.cuda_graphs.test_graph_capture import Captured
from tests.unit_tests.support.drafters import assert_same, assert_same_cache, caching
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.multi_token import Watched, Watching, build_predicting, predicting, worst_difference
from tests.unit_tests.support.oracle import Oracle

SCORED = {"return_log_probs": True, "skip_prompt_log_probs": True}
KINDS = ["attention_only", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("hybrid", "gated_delta_net"))]


class Seldom:
    """Mixin for drivers: drafts after every third step."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)
        propose, turns = self.drafter.propose, itertools.count()
        self.drafter.propose = lambda asks: {} if next(turns) % 3 else propose(asks)


class WatchedCaptured(Seldom, Watching, Captured):
    """Driver with captured steps that replay what was captured."""


class LayeredCaptured(Seldom, WatchingLayers, Captured):
    """Driver with captured steps of a model with a layer for each depth."""


def talk(driver: Driver) -> None:
    """Two requests beside each other, and a turn after one of them, which finds its blocks cached."""
    for name in range(2):
        driver.add(name, make_prompt(21 + name, name), num_tokens_to_generate=12, **SCORED)
    first = driver.run()[0]
    turn = [*first.prompt_tokens, *first.generated_tokens, 7]
    driver.add(2, turn, num_tokens_to_generate=12, **SCORED)
    driver.run()


@pytest.mark.parametrize("is_layered", [False, True], ids=["one_layer", "depths"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_keep_hidden_states(monkeypatch, kind, is_layered):
    """SP-12, SP-16, CU-4: all is as without drafts, and drafts are those of the whole text, captured or eager."""
    monkeypatch.setattr(sizes, "MIXED_STEPS", ((2, 48),))
    settings = {"max_requests": 2, "max_sequence_length": 64}
    driver = (LayeredCaptured if is_layered else WatchedCaptured)(kind, 2, "kernel", **settings)
    talk(driver)
    config = driver.config if is_layered else CONFIGS[kind]  # blocks' hashes depend on it
    plain = Driver(driver.model, config, cache=caching("kernel"), **settings)
    talk(plain)
    assert_same(driver, plain)
    assert_same_cache(driver, plain)
    assert min(len(driver.buckets), driver.eager_steps, driver.scheduler.counters.accepted) > 3
    assert (driver.worst_difference() if is_layered else worst_difference(driver)) < 1e-4
    for name in range(2):  # the hidden states of a prompt are those of a captured step
        firsts = {draft[3] if is_layered else draft[4] for draft in driver.drafts if draft[0] == name}
        assert firsts == {1}


def counting(records: RecordedSteps) -> list[object]:
    """Return a list that gets an entry for each step that is repeated from now on."""
    repeats: list[object] = []
    repeat, record = records._repeat, records._record
    records._repeat = lambda *given: (repeats.append(given[2]), repeat(*given))[1]
    records._record = lambda *given: (repeats.pop(), record(*given))[1]
    return repeats


class RecordedLayers(WatchingLayers, Driver):
    """Driver of a model with a layer for each depth."""


@pytest.mark.skipif(not cpp.are_used(), reason="operators in C++ are off")
@pytest.mark.parametrize(
    ("kind", "is_layered"),
    [
        ("hybrid", False),
        pytest.param("hybrid", True, marks=pytest.mark.long),
        *(pytest.param(one, False, marks=pytest.mark.long) for one in ("gated_delta_net", "mamba1", "short_conv")),
        pytest.param("attention_only", False, marks=pytest.mark.long),
    ],
)
def test_recorded_drafts(kind, is_layered):
    """SP-12, SP-18: repeated steps of model and layer draft what the whole text gives, after a suspension, too."""
    if is_layered:
        driver = RecordedLayers(kind, 2, "kernel", max_requests=2)
        engines = driver.drafter.layers
    else:
        driver = Watched(kind, 2, "kernel", build_predicting(kind), max_requests=2)
        engines = [driver.drafter]
    repeats = [counting(one._context.recorded_steps) for one in engines]
    verified = counting(driver.context.recorded_steps)
    for turn in range(2):
        for name in range(2 * turn, 2 * turn + 2):
            driver.add(name, make_prompt(21 + name, name), num_tokens_to_generate=28, return_log_probs=False)
        for _ in range(12):
            driver.step()
        if turn == 0:
            driver.engine.suspend()
            driver.engine.resume()
        driver.run()
    assert min(map(len, repeats)) > 5
    assert sum(any(one.drafts for one in step.sampling) for step in verified) > 5
    assert driver.scheduler.counters.accepted > 3
    if not is_layered:
        oracle = Oracle(predicting(kind))
        for name in range(4):
            assert_equals_oracle(driver, name, oracle)
    assert (driver.worst_difference() if is_layered else worst_difference(driver)) < 1e-4


@pytest.mark.skipif(not cpp.are_used(), reason="operators in C++ are off")
def test_inputs_of_a_recorded_draft_that_are_not_written_are_seen(monkeypatch):
    """The negative control: repeated steps of the layer read zeros in place of hidden states."""
    driver = Watched("hybrid", 2, "kernel", build_predicting("hybrid"), max_requests=2)
    repeats = counting(driver.drafter._context.recorded_steps)
    fill = PredictionLayerDrafter._filled

    def stale(self, chunks, inputs):
        buffers = fill(self, chunks, inputs)
        if len(repeats) > 4:
            buffers.hidden.zero_()
        return buffers

    monkeypatch.setattr(PredictionLayerDrafter, "_filled", stale)
    driver.add(0, make_prompt(21), num_tokens_to_generate=20, return_log_probs=False)
    driver.run()
    assert len(repeats) > 6
    assert not worst_difference(driver) < 1e-4


@pytest.mark.skipif(not cpp.are_used(), reason="operators in C++ are off")
def test_rows_of_a_recorded_step_that_are_not_set_are_seen(monkeypatch):
    """The negative control: hidden states of repeated steps go to the rows of the first one."""
    driver = Watched("hybrid", 2, None, build_predicting("hybrid"), max_requests=2)
    repeats = counting(driver.context.recorded_steps)
    writing, staged = HiddenStates.writing, []

    @contextlib.contextmanager
    def stale(self, chunks):
        with writing(self, chunks):
            staged.append(self._targets.clone())
            if len(staged) > 4:
                self._targets.copy_(staged[0])
            yield

    monkeypatch.setattr(HiddenStates, "writing", stale)
    driver.add(0, make_prompt(21), num_tokens_to_generate=20, return_log_probs=False)
    driver.run()
    assert len(repeats) > 4
    assert not worst_difference(driver) < 1e-4
