"""SP-6: costs of drafts are fitted to steps of the engine itself, in bounded time, with a clock that counts steps."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config import BatchingConfig
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.engine.core import EngineCore
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.draft_cost_measurement import measure_costs
from megatron_ext.speculation.adaptive import ASSUMED_COST, CostRow, DraftCosts
from megatron_ext.speculation.drafter import Drafter
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.multi_token import predicting
from tests.unit_tests.support.tokenizers import PieceTokenizer

KIND, DRAFTS = "hybrid", 3
FIXED, EACH = 0.3, 0.1


class StepClock:
    """Clock on which a step takes `step` seconds without drafts, and more with them; nothing else takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
        self.now, self.steps, compute = 0.0, 0, EngineCore.step

        def timed(core: EngineCore):
            requests, drafted = len(core.scheduler.queues.running), core.counters.drafted
            output = compute(core)
            drafted = core.counters.drafted - drafted
            self.now += step * (1 + (FIXED + EACH * drafted / requests if drafted else 0))
            self.steps += 1
            return output

        monkeypatch.setattr(EngineCore, "step", timed)

    def __call__(self) -> float:
        return self.now


def engine_of(
    method: str = "ngram",
    speculation: SpeculationConfig | None = None,
    drafter: Drafter | None = None,
    **batching: object,
) -> InferenceEngine:
    """Engine whose costs are given, and so have not been measured."""
    settings = {"block_size": 16, "block_count": 100, "max_requests": 4} | batching
    return build_engine(
        predicting(KIND),
        CONFIGS[KIND],
        PieceTokenizer(CONFIGS[KIND].vocab_size),
        BatchingConfig(**settings),
        dtype=torch.float32,
        speculation=speculation or SpeculationConfig(method, DRAFTS, speculative_draft_cost=ASSUMED_COST),
        drafter=drafter,
    )


def test_costs_of_another_drafter_are_not_measured():
    """A drafter that replaces the settings' own decides itself on its numbers of drafts."""
    adaptive = SpeculationConfig("ngram", DRAFTS)
    assert adaptive.measures_costs
    engine = engine_of(speculation=adaptive, drafter=Drafter())
    assert (engine.context.drafting, engine.step_count) == (None, 0)


def test_each_number_of_requests_has_its_costs(monkeypatch):
    engine = engine_of("mtp")
    drafting = engine.context.drafting
    measure_costs(engine, drafting, StepClock(monkeypatch, step=1e-4))
    rows = [(row.requests, pytest.approx(row.fixed), pytest.approx(row.each)) for row in drafting.costs.rows]
    assert rows == [(requests, FIXED, EACH) for requests in (1, 2, 4)]
    assert engine.core.counters.drafted == engine.step_count == 0


def test_steps_with_fewer_drafts_than_asked_for_do_not_count(monkeypatch):
    """A step of 12 tokens has room for 3 drafts of each of 2 requests, and for one of each of 4."""
    engine = engine_of(max_tokens=12)
    measure_costs(engine, engine.context.drafting, StepClock(monkeypatch, step=1e-4))
    rows = [(row.requests, row.fixed, row.each) for row in engine.context.drafting.costs.rows]
    whole, one_draft = (pytest.approx(FIXED), pytest.approx(EACH)), (pytest.approx(0.0), pytest.approx(FIXED + EACH))
    assert rows == [(1, *whole), (2, *whole), (4, *one_draft)]


def test_slow_steps_end_it_after_a_round_of_one_request(monkeypatch):
    """Costs of more requests are estimated."""
    engine, clock = engine_of(), StepClock(monkeypatch, step=1.0)
    measure_costs(engine, engine.context.drafting, clock)
    one, most = engine.context.drafting.costs.rows
    assert clock.steps == 1 + 3 * 4  # a prefill, and four steps each with 0, 1 and 3 drafts
    assert (one.requests, one.each) == (1, pytest.approx(EACH))
    assert most == CostRow(4, one.fixed, pytest.approx(4 * EACH))


@pytest.mark.parametrize(("blocks", "longest", "requests"), [(1, 2, []), (1, 80, [1, 4]), (4, 80, [1, 2, 4])])
def test_pools_that_do_not_hold_so_many_requests(monkeypatch, caplog, blocks, longest, requests):
    """What cannot be measured is estimated, or assumed."""
    engine = engine_of(block_count=blocks, max_sequence_length=longest)
    drafting = engine.context.drafting
    measure_costs(engine, drafting, StepClock(monkeypatch, step=1e-4))
    if requests:
        assert [row.requests for row in drafting.costs.rows] == requests
    else:
        assert drafting.costs == DraftCosts.constant(ASSUMED_COST)
        assert "the pools are too small to measure what drafts cost" in caplog.text
