"""CU-6: eager steps of an engine with captured ones: launched ahead, results equal those of an engine that waits."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_ext.config.batching import LOGPROBS_MODES
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.layers.moe import reads_back
from megatron_ext.runner.cuda_graphs import buckets
from megatron_ext.runner.cuda_graphs.async_output import Launched
from megatron_ext.runner.cuda_graphs.input_buffers import PrevSampledTokenIds
from megatron_ext.scheduling.async_planning import AsyncPlanner
from tests.unit_tests.mcore.test_random_lives import Life
from tests.unit_tests.runner.cuda_graphs.test_cuda_graph_runner import new_driver
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, assert_logits_close, make_prompt
from tests.unit_tests.support.padded import PaddedDriver, PaddedHybridDriver

SIZES = {"max_tokens": 280, "max_sequence_length": 1000, "block_count": 200}
SCORED = {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 2}
KINDS = ["hybrid", "gated_delta_net", "attention_only", "experts"]


def serve(driver: Driver) -> None:
    """A request decodes while a prompt of three eager chunks is computed; a hit on it follows, cold and drawn ones."""
    driver.add(0, make_prompt(20), num_tokens_to_generate=14, temperature=0.8, top_k=9, seed=7, **SCORED)
    for _ in range(3):
        driver.step()
    driver.add(1, make_prompt(700), num_tokens_to_generate=6, **SCORED)
    driver.run()
    driver.add(2, [*make_prompt(700), *make_prompt(290, 1)], num_tokens_to_generate=4, return_log_probs=False)
    driver.add(3, make_prompt(270, 2), num_tokens_to_generate=5, return_log_probs=False, repetition_penalty=1.2)
    driver.run()


@pytest.mark.parametrize("kind", KINDS)
def test_long_prefills_equal_those_that_are_waited_for(get_oracle, kind):
    """CU-6, SA-16: tokens, logits, log-probs of both modes, counts; beside decodes whose tokens are on the device."""
    mode = LOGPROBS_MODES[kind == "hybrid"]
    padded = new_driver(kind, get_oracle, **SIZES, logprobs_mode=mode)
    serve(padded)
    plain = new_driver(kind, get_oracle, Driver, **SIZES, logprobs_mode=mode)
    serve(plain)
    assert padded.eager_steps > 1
    for request_id, record in plain.records.items():
        found = padded.records[request_id]
        assert found.generated_tokens == record.generated_tokens
        assert found.skipped_prefill_token_count == record.skipped_prefill_token_count
        assert found.prefill_reasons == record.prefill_reasons
        if record.generated_log_probs is not None:
            assert found.generated_log_probs == pytest.approx(record.generated_log_probs, abs=1e-4)
        own, others = padded.seen[request_id].logits, plain.seen[request_id].logits
        for position, (logits, *_) in others.items():
            assert_logits_close(own[position][0], logits, f"request {request_id} after {position} tokens")
    assert padded.scheduler.cache.use() == plain.scheduler.cache.use()


def events_of(driver: PaddedDriver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches and reads of the driver's steps, in order; a step's name is the end of its chunk."""
    events: list[str] = []
    launched: list[tuple[Launched, int]] = []
    runner, read = driver.context.cuda_graph_runner, Launched.result

    def watched(sample, chunks_of):
        def noted(*arguments):
            found, end = sample(*arguments), max(chunk.end for chunk in chunks_of(*arguments))
            launched.append((found, end))
            events.append(f"launch {end}")
            return found

        return noted

    def read_noted(found):
        events.append(next(f"read {end}" for one, end in launched if one is found))
        return read(found)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "sample", watched(runner.sample, lambda bucket, chunks, needs: chunks))
        patch.setattr(runner, "sample_eager", watched(runner.sample_eager, lambda logits, step: step.chunks))
        patch.setattr(Launched, "result", read_noted)
        driver.run()
    return events


def test_the_next_step_is_launched_before_the_tokens_are_read(get_oracle, monkeypatch):
    """CU-6: the chunks of a long prompt, and the decode after them, which is captured."""
    driver = new_driver("hybrid", get_oracle, **SIZES)
    driver.add(1, make_prompt(840, 1), num_tokens_to_generate=3)
    driver.run()  # graphs are captured in the first steps that need them
    driver.add(0, make_prompt(840), num_tokens_to_generate=3)
    assert events_of(driver, monkeypatch) == [
        "launch 280",
        "launch 560",
        "read 280",
        "launch 840",
        "read 560",
        "launch 841",
        "read 840",
        "launch 842",
        "read 841",
        "read 842",
    ]


def test_a_forward_that_waits_is_not_launched_ahead(get_oracle, monkeypatch):
    """CU-6: experts read back how many tokens they have; a launch would delay the tokens of the step before."""
    driver = new_driver("experts", get_oracle, **SIZES)
    assert reads_back(get_oracle("experts").model)
    assert not reads_back(get_oracle("hybrid").model)
    driver.add(1, make_prompt(840, 1), num_tokens_to_generate=2)
    driver.run()
    driver.add(0, make_prompt(840), num_tokens_to_generate=2)
    waited = ["launch 280", "read 280", "launch 560", "read 560"]
    assert events_of(driver, monkeypatch) == [*waited, "launch 840", "launch 841", "read 840", "read 841"]
    monkeypatch.setattr(InferenceController, "waits_in_forward", False)
    driver.add(2, make_prompt(840, 2), num_tokens_to_generate=1)
    assert events_of(driver, monkeypatch)[:3] == ["launch 280", "launch 560", "read 280"], "the negative control"


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_prefill_that_fails_sends_both_steps_back(get_oracle, monkeypatch, at):
    """CU-6: an error in a launch, or in the one after it; no tokens are taken from either step."""
    driver = new_driver("hybrid", get_oracle, **SIZES)
    runner, calls = driver.context.cuda_graph_runner, []
    sample = runner.sample_eager

    def broken(*arguments):
        calls.append(None)
        if len(calls) == at:
            raise RuntimeError("the device is gone")
        return sample(*arguments)

    monkeypatch.setattr(runner, "sample_eager", broken)
    driver.add(0, make_prompt(840), num_tokens_to_generate=4)
    with pytest.raises(RuntimeError, match="the device is gone"):
        driver.run()
    assert not driver.context.cuda_graph_runner.prev_sampled_token_ids.are_on_device
    assert [one.computed_end for one in driver.scheduler.queues.waiting] == [0]
    driver.run()
    assert driver.records[0].generated_tokens == get_oracle("hybrid").greedy(make_prompt(840), 4).tokens
    assert driver.steps_ahead > 2


def test_tokens_that_are_not_taken_are_seen(get_oracle, monkeypatch):
    """The negative control: decodes beside a prefill get other tokens."""
    monkeypatch.setattr(PrevSampledTokenIds, "read", lambda last, places: torch.zeros_like(places))
    driver = new_driver("attention_only", get_oracle, **SIZES, decode_share=0.0)  # long prefills beside decodes
    driver.add(0, make_prompt(20), num_tokens_to_generate=14)
    driver.add(1, make_prompt(700), num_tokens_to_generate=4)
    driver.run()
    with pytest.raises(AssertionError):
        assert_equals_oracle(driver, 0, get_oracle("attention_only"))


def test_tokens_of_two_decodes(get_oracle):
    """CU-6: rows move from a captured step to an eager one; each decode gets its own token."""
    driver = new_driver("attention_only", get_oracle, **SIZES)
    for request_id in range(2):
        driver.add(request_id, make_prompt(20, request_id), num_tokens_to_generate=14)
    driver.add(2, make_prompt(840), num_tokens_to_generate=2)
    driver.run()
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, get_oracle("attention_only"))


@pytest.mark.parametrize(
    ("seed", "kind", "settings"),
    [
        pytest.param(1, "mamba1", {"slots": 4, "block_count": 12}, marks=pytest.mark.long),
        (1, "hybrid", {"slots": 4, "block_count": 12}),
        (2, "gated_delta_net", {"mode": "align", "max_tokens": 40}),
    ],
)
def test_random_lives(get_oracle, monkeypatch, seed, kind, settings):
    """CU-6: nearly all prefills are eager, and chunks of prompts are launched ahead: the oracle's logits and states."""
    monkeypatch.setattr(buckets, "MIXED_STEPS", ((1, 8),))
    settings = {"max_requests": 4, "block_count": 200, "max_sequence_length": 160, "max_tokens": 30} | settings
    driver = PaddedHybridDriver(get_oracle(kind).model, CONFIGS[kind], **settings)
    plan_next, prefills = AsyncPlanner.plan_next, []

    def plan_noted(planner, computed, **options):
        plan = plan_next(planner, computed, **options)
        prefills.extend(one for one in (() if plan is None else plan.chunks) if not one.is_decode)
        return plan

    monkeypatch.setattr(AsyncPlanner, "plan_next", plan_noted)
    life = Life(driver, random.Random(f"eager {seed}"))
    life.live(get_oracle(kind), actions=60)
    assert driver.eager_steps > 5
    assert len(prefills) > 5
