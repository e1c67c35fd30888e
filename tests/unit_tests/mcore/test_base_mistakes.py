"""Mistakes of megatron-core 0.16.1's own engine that ours must not make: one test (or class) for each."""

from __future__ import annotations

import pytest
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext.scheduling import planner
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.models import EXPERTS
from tests.unit_tests.support.oracle import Oracle

KINDS = ("hybrid", "attention_only")


@pytest.mark.parametrize("kind", KINDS)
class TestChunkThatCannotBeScheduled:
    """The base runs a mid-prefill request without a next chunk as a decode, which corrupts its KV and its states."""

    def test_a_request_without_a_chunk_is_not_in_the_forward(self, get_driver, get_oracle, kind, monkeypatch):
        driver = get_driver(kind, max_tokens=40)
        driver.add(0, make_prompt(3), num_tokens_to_generate=20)
        driver.add(1, make_prompt(129))
        driver.step()
        with monkeypatch.context() as patch:
            patch.setattr(planner, "plan_continuations", lambda *_: [])
            for _ in range(3):
                driver.step()
        assert [len(step) for step in driver.steps] == [2, 1, 1, 1]
        driver.run()
        for request_id in (0, 1):
            assert_equals_oracle(driver, request_id, get_oracle(kind))


@pytest.mark.parametrize(("kind", "chunked"), [("hybrid", True), ("attention_only", False)])
class TestSuspend:
    """The base dies of a suspend within a chunked prefill ("Continuation current_id mismatch"); resume() forgets."""

    def test_in_the_middle_of_everything(self, get_driver, get_oracle, kind, chunked):
        limits = {"max_tokens": 40} if chunked else {"max_tokens": 200, "enable_chunked_prefill": False}
        driver = get_driver(kind, max_requests=3, **limits)
        driver.add(0, make_prompt(5))  # decodes when the engine is suspended
        driver.add(1, make_prompt(129))  # is mid-prefill, if that is chunked
        driver.add(2, make_prompt(64))
        driver.add(3, make_prompt(17))  # waits
        for _ in range(2):
            driver.step()
        assert (0 < driver.engine.get_request(1).computed_end < 129) == chunked
        driver.engine.suspend()
        driver.engine.check()
        driver.engine.suspend()  # again: nothing happens
        assert driver.context.pools is None
        assert driver.free_blocks == driver.scheduler.cache.pool.total
        driver.add(4, make_prompt(33))  # arrives meanwhile
        driver.engine.resume()
        driver.engine.resume()
        driver.engine.check()
        driver.run()
        for request_id in range(5):
            assert_equals_oracle(driver, request_id, get_oracle(kind))
        assert driver.records[0].recomputed_token_count == driver.seen[0].chunks[1][1]
        assert driver.events(0) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "ADD_CONTEXT", "FINISH"]


EVICTED_PROMPT = make_prompt(20)
EVICTED_PARAMS = {
    "num_tokens_to_generate": 20,
    "temperature": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "seed": 11,
    "top_n_logprobs": 3,
    "cache_salt": "tenant",
    "enable_prefix_caching": False,
}


class TestEvictionKeepsTheRequest:
    """KV-10, EX-5: the base's eviction drops stop words and every attribute that was added to a request."""

    def alone(self, get_driver, kind: str, **more: object) -> Driver:
        driver = get_driver(kind)
        driver.add(1, EVICTED_PROMPT, **EVICTED_PARAMS, **more)
        driver.run()
        return driver

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_record_is_that_of_a_run_alone(self, get_driver, kind):
        unstopped = self.alone(get_driver, kind).records[1]
        tokens = unstopped.generated_tokens
        stop = next(f"<{token}>" for token in tokens[14:] if token not in tokens[:13])  # comes after the eviction
        expected = self.alone(get_driver, kind, stop_words=(stop,)).records[1]
        assert expected.finish_reason == "stop"

        driver = get_driver(kind, block_count=6)
        driver.add(0, make_prompt(60), num_tokens_to_generate=30)
        driver.add(1, EVICTED_PROMPT, **EVICTED_PARAMS, stop_words=(stop,))
        request = driver.engine.get_request(1)
        params = request.params
        driver.run()
        record = driver.records[1]
        assert driver.events(1) == [
            *("ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "EVICT", "ADD_CONTEXT", "FINISH"),
        ]
        assert request.params is params
        assert (params.cache_salt, params.enable_prefix_caching) == ("tenant", False)
        assert record.generated_tokens == expected.generated_tokens
        assert record.generated_text == expected.generated_text
        assert record.finish_reason == "stop"
        assert record.generated_log_probs == pytest.approx(expected.generated_log_probs, abs=1e-4, rel=1e-4)
        assert record.prompt_log_probs == pytest.approx(expected.prompt_log_probs, abs=1e-4, rel=1e-4)
        assert [list(top) for top in record.generated_top_n_log_probs] == [
            list(top) for top in expected.generated_top_n_log_probs
        ]
        assert len(record.prompt_top_n_log_probs) == 19
        times = {event.type: event.timestamp for event in record.events}
        assert record.ttft == times[EventType.FIRST_TOKEN] - times[EventType.ADD_ENGINE]
        assert times[EventType.FIRST_TOKEN] < times[EventType.EVICT]


class TestSmallPools:
    """Small pools kill the base's loop; a budget of 0 silently gives 2 blocks; blocks pay for a running state each."""

    @pytest.mark.parametrize(("kind", "blocks"), [("hybrid", 1), ("attention_only", 2), ("hybrid", 5)])
    def test_the_loop_survives(self, get_driver, get_oracle, kind, blocks):
        driver = get_driver(kind, block_count=blocks)
        lengths = (1, 16, 17, 40, 80, 3)
        for request_id, length in enumerate(lengths):
            driver.add(request_id, make_prompt(length), num_tokens_to_generate=5)
        driver.run()
        for request_id, length in enumerate(lengths):
            record = driver.records[request_id]
            if length <= 16 * blocks:
                assert_equals_oracle(driver, request_id, get_oracle(kind))
                assert len(record.generated_tokens) == min(5, 16 * blocks + 1 - length)  # the last is not computed
            else:
                assert record.status is Status.FAILED
                assert f"the KV pool has {blocks}, for {16 * blocks} tokens" in record.error


class TestDummyForward:
    """The base's dummy step (expert parallelism) resets the context if there is a list of CUDA graphs."""

    @pytest.fixture
    def experts(self, get_oracle) -> Oracle:
        """Oracle of a model with experts that the step computes; other layers are passed over."""
        return get_oracle("experts")

    def test_every_moe_layer_computes_one_token(self, experts):
        """Others wait for each of them; and for no other layer."""
        driver, tokens = Driver(experts.model, EXPERTS), []
        hooks = [
            layer.register_forward_pre_hook(lambda layer, inputs: tokens.append((layer.layer_number, *inputs[0].shape)))
            for layer in experts.model.modules()
            if isinstance(layer, MoELayer)
        ]
        driver.engine.controller.dummy_forward()
        for hook in hooks:
            hook.remove()
        assert tokens == [(2, 1, 1, EXPERTS.hidden_size), (4, 1, 1, EXPERTS.hidden_size)]
