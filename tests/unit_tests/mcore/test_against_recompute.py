"""Engine output equals a plain full recompute without any engine: tokens, logits, log-probs, states."""

from __future__ import annotations

import pickle

import pytest

from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

LENGTHS = (1, 3, 4, 63, 64, 65, 127, 129, 300)  # block 16 or 64, kernel chunk 16 or 32, convolution window 4
CHUNKED = {"max_tokens": 80}  # cuts prompts off the grid of blocks and kernel chunks
WHOLE = {"max_tokens": 800, "enable_chunked_prefill": False}
CASES = [
    pytest.param("hybrid", CHUNKED, id="hybrid-chunked"),
    pytest.param("hybrid", WHOLE, id="hybrid-whole"),
    pytest.param("attention_only", CHUNKED, id="attention_only-chunked"),
    pytest.param("attention_only", WHOLE, id="attention_only-whole", marks=pytest.mark.long),
]


def check_all(driver: Driver, oracle: object) -> None:
    assert driver.records
    for request_id in driver.records:
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize(("kind", "prefill"), CASES)
class TestAgainstRecompute:
    def test_alone_in_a_pool_without_a_block_to_spare(self, get_driver, get_oracle, kind, prefill):
        for length in LENGTHS:
            driver = get_driver(kind, block_count=-(-(length + 17) // 16), **prefill)
            driver.add(0, make_prompt(length), num_tokens_to_generate=18)
            driver.run()
            assert driver.fewest_free_blocks == 0
            check_all(driver, get_oracle(kind))

    @pytest.mark.parametrize("paused_blocks", [0, 8])
    def test_mixed_batch_under_pressure(self, get_driver, get_oracle, kind, prefill, paused_blocks):
        """The pool holds six of the nine prompts and nothing more, and four of the six soon need another block."""
        limit = {}
        if paused_blocks is not None:
            block_bytes = get_driver(kind).engine.plan.world.block_bytes
            limit["paused_buffer_size_gb"] = (paused_blocks + 0.5) * block_bytes / 1024**3
        if prefill is CHUNKED:
            prefill = {"max_tokens": 400}  # the prompt of 300 must be done before the others have finished
        driver = get_driver(kind, block_count=49, **prefill, **limit)
        for request_id, length in enumerate(reversed(LENGTHS)):
            driver.add(request_id, make_prompt(length), num_tokens_to_generate=18)
        driver.run()
        assert driver.fewest_free_blocks == 0
        assert driver.count(EventType.EVICT) > 0
        assert (driver.count(EventType.PAUSE) > 0) == (paused_blocks != 0)
        assert sum(record.recomputed_token_count for record in driver.records.values()) > 0
        check_all(driver, get_oracle(kind))


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_a_run_on_pickled_messages(get_driver, get_oracle, kind):
    """Execution needs only the message of a step: no request, no scheduler, no second copy of a fact."""
    driver = get_driver(kind, max_tokens=40)
    stage = driver.context.stage
    driver.context.stage = lambda message: stage(pickle.loads(pickle.dumps(message)))
    for request_id, length in enumerate((3, 70, 17)):
        driver.add(request_id, make_prompt(length))
    driver.run()
    check_all(driver, get_oracle(kind))
