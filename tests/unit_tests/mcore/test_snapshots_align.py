"""LA-1 to LA-5: states kept by scheduling alone.

Chunks end where a snapshot is wanted, and running states are copied.
"""

from __future__ import annotations

import pytest

from megatron_ext.config import CacheConfig
from megatron_ext.errors import ConfigError
from tests.on_request import long_except
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import assert_equals_oracle, assert_states_close, make_prompt
from tests.unit_tests.support.hybrid_caching import (
    HybridDriver,
    assert_snapshots_equal_oracle,
    build_driver,
)


@pytest.fixture
def oracle(get_oracle):
    return get_oracle("hybrid")


def chunks(driver: HybridDriver, request_id: int) -> list[tuple[int, int]]:
    """Chunks of the prompt that a request prefilled, one per step."""
    length = driver.records[request_id].prompt_token_count
    return [chunk for chunk in driver.seen[request_id].chunks if chunk[1] <= length]


def test_where_chunks_end(get_oracle, oracle):
    """LA-1: chunks end on the block grid; the last is cut so that the longest aligned prefix has its snapshot."""
    driver = build_driver(get_oracle, max_tokens=2 * BLOCK + 5, mode="align", max_requests=1)
    prompt = make_prompt(5 * BLOCK + 7)
    driver.sight(0, prompt)
    assert chunks(driver, 0) == [(0, 32), (32, 64), (64, 80), (80, 87)]
    assert assert_snapshots_equal_oracle(driver, prompt, oracle) == [32, 64, 80]


@pytest.mark.parametrize("budget", long_except([BLOCK + 3], [BLOCK, BLOCK + 3]))
def test_prefills_beside_decodes(get_oracle, oracle, budget):
    """LA-1: chunks end inside blocks and catch up; states are kept at boundaries, and resuming there is right."""
    driver = build_driver(get_oracle, mode="align", max_tokens=budget, max_requests=8)
    driver.add(0, make_prompt(5), num_tokens_to_generate=40)
    driver.step()
    prompts = [make_prompt(3 * BLOCK + offset, seed=offset) for offset in range(3)]
    for number, prompt in enumerate(prompts, start=1):
        driver.add(number, prompt, num_tokens_to_generate=6)
    driver.run()
    ends = [end for number in (1, 2, 3) for _, end in chunks(driver, number)]
    assert any(end % BLOCK for end in ends if end < 3 * BLOCK), "none ended inside a block"
    assert {request_id for step in driver.steps[:30] for request_id, *_ in step} == {0, 1, 2, 3}
    for number, prompt in enumerate(prompts, start=1):
        assert {16, 32} <= set(assert_snapshots_equal_oracle(driver, prompt, oracle))
        assert driver.sight(10 + number, [*prompt[:40], *make_prompt(9, seed=number)]) == 32
        assert driver.sight(20 + number, [*prompt, *make_prompt(9, seed=number)]) == 48
    for request_id in driver.records:
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("kind", long_except(["hybrid", "mamba1"], ["hybrid", "gated_delta_net", "mamba1"]))
class TestBothModes:
    """LA-5: equal states where both keep some, and each serves what the other stored."""

    def test_states_are_equal(self, get_oracle, kind):
        prompt = make_prompt(5 * BLOCK)
        kernel, align = build_driver(get_oracle, kind), build_driver(get_oracle, kind, mode="align")
        for driver in (kernel, align):
            driver.sight(0, prompt)
        assert kernel.snapshots_of(prompt) == align.snapshots_of(prompt) == [64, 80]
        for position in (64, 80):
            name, slots = f"snapshot after {position} tokens", []
            for driver in (kernel, align):
                slots.append(driver.slot_of(prompt[:position]))
            for kind in ("conv", "ssm"):
                pools = [getattr(driver.context.allocated.snapshots, kind) for driver in (kernel, align)]
                assert_states_close(pools[0][:, slots[0]], pools[1][:, slots[1]], f"{name}, {kind}")

    @pytest.mark.parametrize("first", ["kernel", "align"])
    def test_each_serves_the_other(self, get_oracle, kind, first):
        driver = build_driver(get_oracle, kind, mode=first)
        prompt = make_prompt(5 * BLOCK + 3)
        driver.sight(0, prompt)
        is_aligned = first == "kernel"
        driver.keep_snapshots(at_chunk_ends=is_aligned)
        longer = [*prompt, *make_prompt(50, seed=1)]
        assert driver.sight(1, longer) == 80
        assert driver.sight(2, longer) == 128
        for number in range(3):
            assert_equals_oracle(driver, number, get_oracle(kind))


class TestStartUp:
    """LA-3: start-up errors are one line, before anything is allocated."""

    @pytest.mark.parametrize(
        ("batching", "message"),
        [
            (
                {"max_tokens": 15, "max_requests": 4},
                r"block of 16 tokens in a step; .*-max-tokens 15 must be at least 16",
            ),
            ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill forbids; drop one"),
        ],
    )
    def test_refused(self, get_driver, batching, message):
        with pytest.raises(ConfigError, match=message):
            get_driver(cache=CacheConfig(snapshot_mode="align"), **batching)

    @pytest.mark.parametrize(("mode", "budget", "lines"), [("align", 19, 1), ("align", 20, 0), ("kernel", 19, 0)])
    def test_one_block_is_enough_and_its_cost_is_logged_once(self, get_driver, caplog, mode, budget, lines):
        driver = get_driver(cache=CacheConfig(snapshot_mode=mode), max_tokens=budget, max_requests=4)
        driver.add(0, make_prompt(40))
        driver.run()
        said = [record.getMessage() for record in caplog.records if "end inside a block" in record.getMessage()]
        assert len(said) == lines
        assert all("max-tokens 19" in line and line.endswith("give 20") for line in said)
