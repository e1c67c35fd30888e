"""Drafts of multi-token prediction beside captured steps, which write the hidden states that later drafts read."""

from __future__ import annotations

import itertools

import pytest

from megatron_ext.runner.cuda_graphs import buckets as sizes
from tests.unit_tests.mcore.test_multi_token_layers import WatchingLayers
from tests.unit_tests.runner.cuda_graphs.test_graph_capture import Captured
from tests.unit_tests.support.drafters import caching
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.multi_token import Watching, worst_difference

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
        driver.add(name, make_prompt(21 + name, name), num_tokens_to_generate=12, return_log_probs=False)
    first = driver.run()[0]
    turn = [*first.prompt_tokens, *first.generated_tokens, 7]
    driver.add(2, turn, num_tokens_to_generate=12, return_log_probs=False)
    driver.run()


@pytest.mark.parametrize("is_layered", [False, True], ids=["one_layer", "depths"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_keep_hidden_states(monkeypatch, kind, is_layered):
    """SP-12, SP-16, CU-4: tokens are those without drafts, and drafts those of the whole text, captured or eager."""
    monkeypatch.setattr(sizes, "MIXED_STEPS", ((2, 48),))
    settings = {"max_requests": 2, "max_sequence_length": 64}
    driver = (LayeredCaptured if is_layered else WatchedCaptured)(kind, 2, "kernel", **settings)
    talk(driver)
    plain = Driver(driver.model, CONFIGS[kind], cache=caching("kernel"), **settings)
    talk(plain)
    for name, record in plain.records.items():
        assert driver.records[name].generated_tokens == record.generated_tokens
        assert driver.records[name].skipped_prefill_token_count == record.skipped_prefill_token_count
    assert min(len(driver.buckets), driver.eager_steps, driver.scheduler.counters.accepted) > 3
    assert (driver.worst_difference() if is_layered else worst_difference(driver)) < 1e-4
    for name in range(2):  # the hidden states of a prompt are those of a captured step
        firsts = {draft[3] if is_layered else draft[4] for draft in driver.drafts if draft[0] == name}
        assert firsts == {1}
