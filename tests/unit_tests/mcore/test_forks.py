"""KV-6, RL-5: one of several samples of a prompt computes it; the others take over its blocks and states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch

from megatron_ext.config import CacheConfig, RequestParams
from megatron_ext.config.in_flight import InFlight
from megatron_ext.models.build import build_model
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request_inputs import RequestInputs
from tests.unit_tests.mcore.test_routing_replay import GPT, assert_recorded
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.oracle import Oracle

PROMPT = make_prompt(55)  # three blocks and seven tokens
USUAL = ("hybrid", "attention_only", "mamba1")
CACHED = CacheConfig(snapshot_slots=40)


@pytest.fixture(scope="module")
def models():
    """A function: the model of a kind, and its oracle."""
    made = {}

    def make(kind: str):
        if kind not in made:
            model = build_slow_decay(CONFIGS[kind])
            made[kind] = model, Oracle(model)
        return made[kind]

    return make


@pytest.fixture
def start(models):
    """A function: a driver of a model, and the model's oracle."""

    def make(kind: str = "hybrid", cache: CacheConfig = CACHED, **batching: object) -> tuple[Driver, Oracle]:
        model, oracle = models(kind)
        return Driver(model, CONFIGS[kind], cache=cache, **batching), oracle

    return make


def add_samples(driver: Driver, ids: Iterable[int], prompt: list[int] = PROMPT, **params: object) -> None:
    """Let samples of a prompt wait, whose group is the first id."""
    ids = list(ids)
    settings = {"num_tokens_to_generate": 8, "return_log_probs": True, "skip_prompt_log_probs": True} | params
    for request_id in ids:
        driver.engine.core.add(request_id, RequestInputs(tuple(prompt), RequestParams(**settings)), group=ids[0])


def prefilled(driver: Driver) -> int:
    return driver.engine.core.counters.prefill_tokens


def check(driver: Driver, oracle: Oracle, ids: Iterable[int]) -> None:
    driver.run()
    for request_id in ids:
        assert_equals_oracle(driver, request_id, oracle)


class TestOnePrefill:
    @pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.long) for kind in CONFIGS]
    )
    def test_each_prompt_is_computed_once(self, start, kind):
        """Several samples of several prompts give what a plain recompute gives, for each kind of layer."""
        driver, oracle = start(kind)
        add_samples(driver, range(4))
        add_samples(driver, range(4, 7), make_prompt(48))  # whole blocks
        add_samples(driver, range(7, 9), make_prompt(5))  # no whole block
        check(driver, oracle, range(9))
        assert prefilled(driver) == 55 + 48 + 5
        assert [driver.records[i].skipped_prefill_token_count for i in range(9)] == [0, 55, 55, 55, 0, 48, 48, 0, 5]

    @pytest.mark.parametrize("settings", [{"max_tokens": 20}, {"max_tokens": 64, "max_prefills_per_step": 1}])
    @pytest.mark.parametrize("mode", ["kernel", "align"])
    def test_in_chunks(self, start, mode, settings):
        """Samples wait for the step in which the prefill ends."""
        driver, oracle = start(cache=dataclasses.replace(CACHED, snapshot_mode=mode), **settings)
        add_samples(driver, range(3))
        add_samples(driver, range(3, 6), make_prompt(40, seed=3))
        check(driver, oracle, range(6))
        assert prefilled(driver) == 55 + 40

    def test_a_cached_prompt(self, start):
        """The first sample resumes like any request, the others take over what it computes."""
        driver, oracle = start()
        add_samples(driver, [0])
        driver.run()
        add_samples(driver, range(1, 4))
        check(driver, oracle, range(4))
        assert prefilled(driver) == 55 + 7

    def test_experts_are_recorded(self):
        """MF-9: routing indices of a prompt that was taken over, and of requests that hit its blocks."""
        model = build_model(GPT, device=torch.device("cpu"), seed=3)
        driver = Driver(model, GPT, cache=CacheConfig(), moe_enable_routing_replay=True)
        add_samples(driver, range(3), num_tokens_to_generate=20)
        add_samples(driver, [3], [*PROMPT, 1, 2])
        driver.run()
        for record in driver.records.values():
            assert_recorded(record, model, GPT)


class TestSources:
    def test_one_that_ends_with_its_first_token(self, start):
        driver, oracle = start()
        for request_id, count in enumerate((1, 8, 1, 8)):
            params = RequestParams(num_tokens_to_generate=count, return_log_probs=False)
            driver.engine.core.add(request_id, RequestInputs(tuple(PROMPT), params), group=0)
        check(driver, oracle, range(4))
        assert prefilled(driver) == 55

    def test_one_that_leaves_before(self, start):
        """EX-8: another sample computes the prompt then."""
        driver, oracle = start(max_tokens=20)
        add_samples(driver, range(4))
        driver.step()
        driver.engine.core.output.abort(driver.engine.core.output.get(0))
        check(driver, oracle, range(1, 4))
        assert driver.records[0].status is Status.ABORTED
        assert [driver.records[i].computed_prefill_token_count for i in range(1, 4)] == [55, 0, 0]

    @pytest.mark.parametrize("in_flight", [None, InFlight.CONTINUE, InFlight.RECOMPUTE])
    def test_one_that_began_before(self, start, in_flight):
        """EX-4: nothing is taken over from a prefill that began before the weights changed, or the cache was reset.

        A prefill that begins again is as good as any.
        """
        driver, oracle = start(max_tokens=20)
        add_samples(driver, range(3))
        driver.step()
        core = driver.engine.core
        core.reset_prefix_cache() if in_flight is None else core.weights_changed(in_flight)
        check(driver, oracle, range(3))
        second = 0 if in_flight is InFlight.RECOMPUTE else 55
        assert [driver.records[i].computed_prefill_token_count for i in range(3)] == [55, second, 0]


class TestRoom:
    def test_few_blocks(self, start):
        """Samples are preempted and paused as other requests are; blocks are neither lost nor shared too long."""
        driver, oracle = start(block_count=8)
        add_samples(driver, range(5), num_tokens_to_generate=30)
        check(driver, oracle, range(5))

    def test_a_step_that_fails(self, start, monkeypatch):
        """The forks of a failed step wait again, and are forks of the next one."""
        driver, oracle = start()
        add_samples(driver, range(3))
        compute, failures = driver.engine.controller.sample, iter([RuntimeError("planted")])

        def fail_once(logits):
            result = compute(logits)
            for error in failures:
                raise error
            return result

        monkeypatch.setattr(driver.engine.controller, "sample", fail_once)
        with pytest.raises(RuntimeError, match="planted"):
            driver.engine.core.step()
        driver.engine.check()
        assert len(driver.scheduler.queues.waiting) == 3
        driver.seen.clear()
        check(driver, oracle, range(3))
        assert prefilled(driver) == 55
