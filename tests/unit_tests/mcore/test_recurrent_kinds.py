"""M1-1 to M1-4, LA-2: each kind of recurrent layer in the engine, cache on beside cache off; what is special to one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from tests.on_request import long_except
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, assert_snapshots_equal_oracle, build_driver

KINDS = ["gated_delta_net", "mamba1", "mamba1_only", "side_by_side", "short_conv"]
MODES = ["kernel", "align"]
PROMPT = make_prompt(4 * BLOCK + 3)
BRANCH = [*PROMPT[: 2 * BLOCK + 5], *make_prompt(30, seed=1)]


def play(driver: Driver) -> Driver:
    """A prompt, again beside one that parts from it, again when all have ended, and the next turn of the chat."""
    driver.add(0, PROMPT, num_tokens_to_generate=20)
    while not driver.seen[0].logits:
        driver.step()
    driver.add(1, PROMPT)
    driver.add(2, BRANCH)
    driver.add(3, make_prompt(3))
    driver.run()
    driver.add(4, BRANCH)
    driver.add(5, [*PROMPT[: 2 * BLOCK + 1], *make_prompt(20, seed=3)])
    driver.add(6, [*PROMPT, *driver.records[0].generated_tokens, *make_prompt(5, seed=2)])
    driver.run()
    return driver


@functools.cache
def play_off(get_driver: Callable[..., Driver], kind: str) -> Driver:
    return play(get_driver(kind, max_requests=8, max_tokens=70))


CASES = [(kind, mode, most) for kind in KINDS for mode in MODES for most in (21 if mode == "kernel" else 70, 400)]
FIRST = [("mamba1", "align", 70), ("short_conv", "kernel", 21)]
ZEROED = [("mamba1", "conv"), ("mamba1", "ssm"), ("short_conv", "conv")]


@pytest.mark.parametrize(("kind", "mode", "max_tokens"), long_except(FIRST, [*CASES, ("gated_delta_net", "align", 21)]))
def test_cache_on_equals_cache_off(get_driver, get_oracle, kind, mode, max_tokens):
    """M1-1, M1-3, LA-1, LA-2, HY-3, HY-4, HY-6, HY-7, EX-1: tokens, logits, states, snapshots, skipped tokens."""
    driver = play(build_driver(get_oracle, kind, mode=mode, max_requests=8, max_tokens=max_tokens))
    off = play_off(get_driver, kind)
    assert driver.engine.plan.world.kernel_chunk == off.engine.plan.world.kernel_chunk  # M1-4
    leaves_more = mode == "align" and max_tokens < 2 * BLOCK  # a snapshot at every boundary, as chunks end
    assert driver.skipped(*range(7)) == [0, 64, 32 if leaves_more else 0, 0, 64, 32, 80]
    for request_id in range(7):
        assert_equals_oracle(driver, request_id, get_oracle(kind))
        assert driver.records[request_id].generated_tokens == off.records[request_id].generated_tokens
    assert assert_snapshots_equal_oracle(driver, PROMPT, get_oracle(kind))[-1] == 64
    assert assert_snapshots_equal_oracle(driver, BRANCH, get_oracle(kind))[-2:] == [48 if leaves_more else 32, 64]


@pytest.mark.parametrize("kind", long_except(["short_conv"], KINDS))
def test_at_every_length(get_oracle, kind):
    """HY-3, HY-8: second and third sighting of N*b + {-1, 0, 1, 2, 3, 4} tokens; a window less one is 2, 3 or 4."""
    mode = MODES[KINDS.index(kind) % 2]
    driver = build_driver(get_oracle, kind, mode=mode, max_requests=8, max_tokens=2 * BLOCK + 3)
    for offset in (-1, 0, 1, 2, 3, 4):
        prompt, first = make_prompt(3 * BLOCK + offset, seed=offset), 10 * (offset + 1)
        assert driver.sight(first, prompt) == 0
        assert driver.sight(first + 1, prompt) == (48 if offset > 0 else 32)
        assert driver.sight(first + 2, [*prompt, *make_prompt(9, seed=7)]) == (32 if offset < 0 else 48)
        for request_id in range(first, first + 3):
            assert_equals_oracle(driver, request_id, get_oracle(kind))


@pytest.mark.parametrize("block", long_except([48], [48, 80]))
def test_snapshots_inside_one_prefill(get_oracle, block):
    """HY-4, HY-12: snapshots are right for every block size; the kernel chunk does not depend on it."""
    driver = build_driver(get_oracle, "gated_delta_net", block_size=block, max_tokens=1000)
    assert driver.engine.plan.world.kernel_chunk == 64
    prompt = make_prompt(3 * block + 7)
    for number, end in enumerate([2 * block + 9, len(prompt), len(prompt)]):
        assert driver.sight(number, prompt[:end]) == [0, 2 * block, 3 * block][number]
        assert_equals_oracle(driver, number, get_oracle("gated_delta_net"))
    snapshots = assert_snapshots_equal_oracle(driver, prompt, get_oracle("gated_delta_net"))
    assert snapshots == [2 * block, 3 * block]


class TestPools:
    """HY-1, HY-2: pools and their sizes are what the mixers say."""

    def test_blocks_of_a_model_without_attention_only_carry_the_index(self, get_oracle):
        """M1-1: they take no memory; the budget is for states alone, and prompts are skipped nevertheless."""
        driver = build_driver(get_oracle, "mamba1_only", block_count=None, buffer_size_gb=0.01, max_requests=4)
        geometry = driver.engine.plan.world
        assert (geometry.block_bytes, geometry.state_in_kv_tokens) == (0, None)
        channels, states, layers, window = 96, 8, 2, 3
        assert geometry.state_bytes == layers * channels * (states + window - 1) * 4
        assert geometry.blocks == 4 * 2048 // BLOCK
        assert driver.sight(0, PROMPT) == 0
        assert driver.sight(1, PROMPT) == 64

    def test_of_a_layer_with_both(self, get_oracle):
        """A layer side by side has a place in both pools; a short convolution has no recurrent state to keep."""
        both = build_driver(get_oracle, "side_by_side").context.pools
        assert (len(both.kv[0]), len(both.live_states.conv), len(both.live_states.ssm)) == (2, 2, 2)
        short = build_driver(get_oracle, "short_conv")
        assert (len(short.context.pools.kv[0]), short.context.allocated.snapshots.ssm.numel()) == (1, 0)
        layers, channels, kept = 3, 48, 4
        assert short.engine.plan.world.state_bytes == layers * channels * kept * 4


class TestNegativeControls:
    """Layers broken in one way must fail the comparison, or the numbers above show nothing."""

    @pytest.mark.parametrize(
        ("kind", "which"), long_except(ZEROED, [(k, w) for k in KINDS for w in ("conv", "ssm")][:-1])
    )
    def test_a_zeroed_slot(self, get_oracle, kind, which):
        """Zero one kind of state of one layer in all snapshots."""
        driver = build_driver(get_oracle, kind)
        driver.sight(0, PROMPT)
        getattr(driver.context.allocated.snapshots, which)[1] = 0.0
        self.assert_is_seen(driver, get_oracle(kind))

    @pytest.mark.parametrize("which", [0, 1])
    def test_keys_or_values_of_a_layer_that_has_states_too(self, get_oracle, which):
        driver = build_driver(get_oracle, "side_by_side")
        driver.sight(0, PROMPT)
        driver.context.pools.kv[which, 1] = 0.0
        self.assert_is_seen(driver, get_oracle("side_by_side"))

    def test_a_state_of_a_chunk_before(self, get_oracle, monkeypatch):
        """The scan gives each chunk the state at the end of the one before."""
        scan = SELECTIVE_SCAN.reference_scan

        def shifted(*args: object, **kwargs: object) -> object:
            scanned = scan(*args, **kwargs)
            return scanned._replace(chunk_states=scanned.chunk_states.roll(1, dims=0))

        driver = build_driver(get_oracle, "mamba1")
        with monkeypatch.context() as patch, SELECTIVE_SCAN.backends.forced("reference"):
            patch.setattr(SELECTIVE_SCAN, "reference_scan", shifted)
            driver.sight(0, PROMPT)
        self.assert_is_seen(driver, get_oracle("mamba1"))

    @staticmethod
    def assert_is_seen(driver: HybridDriver, oracle) -> None:
        assert_equals_oracle(driver, 0, oracle)
        assert driver.sight(1, PROMPT) == 64
        with pytest.raises(AssertionError, match=r"logits of token|^token"):
            assert_equals_oracle(driver, 1, oracle)
        difference = driver.seen[1].logits[len(PROMPT)][0] - oracle.logits(PROMPT)[-1]
        assert not difference.abs().max() < 1e-3


def test_the_oracle_has_a_long_memory(get_oracle):
    """States that the first block left decide the logits 130 tokens later, without any attention."""
    oracle, tokens = get_oracle("mamba1_only"), make_prompt(150)
    changed = [*make_prompt(BLOCK, seed=8), *tokens[BLOCK:]]
    assert (oracle.logits(tokens)[-1] - oracle.logits(changed)[-1]).abs().max() > 1e-2
