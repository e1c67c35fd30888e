"""KV-12, KV-13: prompts of every awkward length, pools of every awkward size, requests that make no sense."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.record import Status
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

KINDS = ("hybrid", "attention_only")
BLOCK = 16


@pytest.mark.parametrize("kind", KINDS)
class TestPromptLengths:
    """KV-12: prompts of one token, block - 1, block, block + 1, two blocks; with and without room to spare."""

    LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)

    @pytest.mark.parametrize(("blocks", "max_tokens"), [(3, 16), (100, 17)])
    def test_together(self, get_driver, get_oracle, kind, blocks, max_tokens):
        driver = get_driver(kind, block_count=blocks, max_tokens=max_tokens)
        for request_id, length in enumerate(self.LENGTHS):
            driver.add(request_id, make_prompt(length), num_tokens_to_generate=6)
        driver.run()
        for request_id in range(len(self.LENGTHS)):
            assert_equals_oracle(driver, request_id, get_oracle(kind))


@pytest.mark.parametrize(
    ("limits", "length", "count", "error"),
    [
        ({"block_count": 3}, 3 * BLOCK + 1, 8, "49 tokens need 4 blocks, and the KV pool has 3, for 48 tokens"),
        ({"max_sequence_length": 30}, 25, 6, "are 31, and a sequence has at most 30; shorten the prompt, or"),
        ({"max_tokens": 40, "enable_chunked_prefill": False}, 41, 8, "fit into a step, which has at most 40; shorten"),
    ],
    ids=["pool", "model", "step"],
)
def test_a_request_that_is_too_large(get_driver, get_oracle, limits, length, count, error):
    """KV-12: it fails alone, with a named reason; one that just fits does not."""
    driver = get_driver(**limits)
    driver.add(0, make_prompt(20), num_tokens_to_generate=8)
    future = driver.add(1, make_prompt(length), num_tokens_to_generate=count)
    driver.add(2, make_prompt(5))
    assert future.done() is False
    driver.run()
    record = future.result()
    assert record is driver.records[1]
    assert (record.status, record.computed_prefill_token_count) == (Status.FAILED, 0)
    assert error in record.error
    assert "\n" not in record.error
    assert driver.events(1) == ["ADD_ENGINE", "ERROR_NONTRANSIENT", "FAIL"]
    for request_id in (0, 2):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_generation_larger_than_the_pool(get_driver, get_oracle, kind):
    """KV-12: the request ends by length when the pool is full."""
    driver = get_driver(kind, block_count=3)
    driver.add(0, make_prompt(40), num_tokens_to_generate=20)
    driver.add(1, make_prompt(5))
    driver.run()
    record = driver.records[0]
    assert (record.status, record.finish_reason) == (Status.COMPLETED, "length")
    assert record.generated_tokens == get_oracle(kind).greedy(make_prompt(40), 9).tokens
    assert len(record.generated_log_probs) == 9
    assert_equals_oracle(driver, 1, get_oracle(kind))


class TestNonsense:
    """Errors of the caller: one line, the value, what would work; and no request is left."""

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "the prompt is empty"),
            ("", "the prompt is empty"),
            (torch.tensor([], dtype=torch.int64), "the prompt is empty"),
            ([3, 97], "token id 97 is not in the vocabulary of 97"),
            ([3, -1], "token id -1 is not in the vocabulary"),
        ],
        ids=["no_tokens", "no_text", "empty_tensor", "too_high", "negative"],
    )
    def test_prompts(self, get_driver, prompt, message):
        driver = get_driver()
        with pytest.raises(ConfigError, match=message) as caught:
            driver.add(0, prompt)
        assert "\n" not in str(caught.value)
        driver.engine.check()
        assert not driver.engine.has_unfinished_requests()
        driver.add(0, [3])  # the id is free

    def test_an_id_in_use(self, get_driver):
        driver = get_driver()
        driver.add(0, [3])
        with pytest.raises(ConfigError, match="request id 0 is in use"):
            driver.add(0, [4])
        driver.run()
        driver.records.clear()
        driver.scheduler.counters.prefill_tokens = 0
        driver.add(0, [4])  # and now it is not
        driver.run()


class TestPrompts:
    """Prompts in three spellings."""

    def test_text_ids_and_tensor(self, get_driver, get_oracle):
        tokens = make_prompt(5)
        text = "".join(f"<{token}>" for token in tokens)
        driver = get_driver()
        driver.add(0, tokens)
        driver.add(1, text)
        driver.add(2, torch.tensor(tokens))
        driver.run()
        for request_id in range(3):
            assert driver.records[request_id].prompt_tokens == tuple(tokens)
            assert driver.records[request_id].prompt_text == (text if request_id == 1 else None)
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))

    def test_generate_answers_in_order(self, get_driver, get_oracle):
        driver = get_driver(max_requests=2, max_tokens=40)
        prompts = [make_prompt(length) for length in (129, 3, 40)]
        records = driver.engine.generate(prompts, RequestParams(num_tokens_to_generate=4))
        for prompt, record in zip(prompts, records, strict=True):
            assert record.prompt_tokens == tuple(prompt)
            assert record.generated_tokens == get_oracle("hybrid").greedy(prompt, 4).tokens
        again = driver.engine.generate(prompts[1:], RequestParams(num_tokens_to_generate=4))
        assert [record.request_id for record in again] == [3, 4]

    def test_log_probs_only_where_asked(self, get_driver, get_oracle):
        driver = get_driver()
        prompt = make_prompt(20)
        driver.add(0, prompt, return_log_probs=False)
        driver.add(1, prompt, skip_prompt_log_probs=True)
        driver.add(2, prompt, top_n_logprobs=4)
        driver.run()
        assert (driver.records[0].generated_log_probs, driver.records[0].prompt_log_probs) == (None, None)
        assert driver.records[1].prompt_log_probs is None
        assert driver.records[1].generated_top_n_log_probs is None
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
        best = get_oracle("hybrid").logits(prompt).log_softmax(-1).topk(4)
        record = driver.records[2]
        assert len(record.prompt_top_n_log_probs) == 19
        for i, top in enumerate([*record.prompt_top_n_log_probs, record.generated_top_n_log_probs[0]]):
            assert list(top) == best.indices[i].tolist()
            assert list(top.values()) == pytest.approx(best.values[i].tolist(), abs=1e-4, rel=1e-4)


@pytest.mark.parametrize(
    ("limits", "waiting"),
    [
        pytest.param({"max_requests": 1}, 3, id="requests"),
        pytest.param({"block_count": 4}, 40, id="blocks"),
        pytest.param({"max_tokens": 20, "enable_chunked_prefill": False}, 20, id="tokens"),
    ],
)
def test_a_refused_admission_changes_nothing(get_driver, get_oracle, limits, waiting):
    """KV-13: a request that does not fit owns nothing, is noted nowhere, and counts once when it does fit."""
    driver = get_driver(**limits)
    driver.add(0, make_prompt(20), num_tokens_to_generate=6)
    driver.add(1, make_prompt(waiting))
    request = driver.engine.get_request(1)
    slots = driver.scheduler.running_slots.free_count
    refused = False
    for _ in range(2):
        driver.step()
        if not request.block_table:
            assert (request.running_slot, request.computed_end, request.timeline.step_count) == (None, 0, 0)
            assert driver.free_blocks == driver.scheduler.cache.pool.total - 2
            assert driver.scheduler.running_slots.free_count == slots - 1
            assert [event.type.name for event in request.timeline.events] == ["ADD_ENGINE"]
            refused = True
        assert refused
    driver.run()
    assert driver.events(1).count("ADD_CONTEXT") == 1
    assert driver.records[1].computed_prefill_token_count == waiting
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
