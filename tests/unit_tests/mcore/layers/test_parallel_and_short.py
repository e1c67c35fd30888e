"""LA-2: layers with keys, values and states at once, and states that are a convolution's alone; on equals off.

`HybridDriver` compares every admission, account, snapshot and KV write with token lists; the numbers here are literal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.causal_conv1d import PLAIN_CONV1D
from tests.priority import TestPriority
from tests.unit_tests.mcore.test_mamba1 import BRANCH, PROMPT, play
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, assert_snapshots_equal_oracle, build_driver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

KINDS = ["side_by_side", "short_conv"]
MODES = ["kernel", "align"]


@pytest.fixture
def get_played(get_driver: Callable[..., Driver]) -> Callable[[str], Driver]:
    return functools.partial(play_off, get_driver)


@functools.cache
def play_off(get_driver: Callable[..., Driver], kind: str) -> Driver:
    return play(get_driver(kind, max_requests=8, max_tokens=70))


@pytest.mark.parametrize("max_tokens", [21, 400])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_on_equals_cache_off(get_oracle, get_played, kind, mode, max_tokens):
    """LA-2, HY-3, HY-4, HY-7, LA-1: tokens, logits, states, snapshots, skipped tokens; chunked prefill."""
    driver = play(build_driver(get_oracle, kind, mode=mode, max_requests=8, max_tokens=max_tokens))
    leaves_more = mode == "align" and max_tokens < 2 * BLOCK
    assert driver.skipped(*range(7)) == [0, 64, 32 if leaves_more else 0, 0, 64, 32, 80]
    for request_id in range(7):
        assert_equals_oracle(driver, request_id, get_oracle(kind))
        off, on = (d.records[request_id].generated_tokens for d in (get_played(kind), driver))
        assert on == off
    assert assert_snapshots_equal_oracle(driver, PROMPT, get_oracle(kind))[-1] == 64
    assert assert_snapshots_equal_oracle(driver, BRANCH, get_oracle(kind))[-1] == 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_at_every_length(get_oracle, kind, mode):
    """HY-3, HY-8: second and third sighting of N*b + {-1, 0, 1, 2, 4} tokens; the window less one is 3, and 4."""
    driver = build_driver(get_oracle, kind, mode=mode, max_requests=8, max_tokens=2 * BLOCK + 3)
    for offset in (-1, 0, 1, 2, 4):
        prompt, first = make_prompt(3 * BLOCK + offset, seed=offset), 10 * (offset + 1)
        assert driver.sight(first, prompt) == 0
        assert driver.sight(first + 1, prompt) == (48 if offset > 0 else 32)
        assert driver.sight(first + 2, [*prompt, *make_prompt(9, seed=7)]) == (32 if offset < 0 else 48)
        for request_id in range(first, first + 3):
            assert_equals_oracle(driver, request_id, get_oracle(kind))


def test_pools_of_a_layer_with_both(get_oracle):
    """A layer side by side has a place in both pools; a short convolution has no recurrent state to keep."""
    both = build_driver(get_oracle, "side_by_side").context
    assert (len(both.pools.kv[0]), len(both.live_states.conv), len(both.live_states.ssm)) == (2, 2, 2)
    short = build_driver(get_oracle, "short_conv")
    assert (len(short.context.pools.kv[0]), short.context.snapshots.ssm.numel()) == (1, 0)
    layers, channels, kept = 3, 48, 4
    assert short.engine.geometry.state_bytes == layers * channels * kept * 4


class TestNegativeControls:
    """Negative controls: layers broken in one way must fail the comparison, or the numbers above show nothing."""

    @pytest.mark.parametrize(
        ("kind", "which"), [("side_by_side", "conv"), ("side_by_side", "ssm"), ("short_conv", "conv")]
    )
    def test_a_zeroed_slot(self, get_oracle, kind, which):
        driver = build_driver(get_oracle, kind)
        driver.sight(0, PROMPT)
        getattr(driver.context.snapshots, which)[1] = 0.0
        self.assert_is_seen(driver, get_oracle(kind))

    @pytest.mark.parametrize("which", [0, 1])
    def test_keys_or_values_of_a_layer_that_has_states_too(self, get_oracle, which):
        driver = build_driver(get_oracle, "side_by_side")
        driver.sight(0, PROMPT)
        driver.context.pools.kv[which, 1] = 0.0
        self.assert_is_seen(driver, get_oracle("side_by_side"))

    def test_a_state_of_a_token_before(self, get_oracle, monkeypatch):
        """The convolution keeps the inputs before the last one."""
        with PLAIN_CONV1D.backends.forced("reference"):
            backend = PLAIN_CONV1D.backends.choose(torch.empty(0))

        def shifted(x: Tensor, tokens: Tensor, *more: Tensor) -> Tensor:
            return backend.states_after(x, tokens - 1, *more)

        driver = build_driver(get_oracle, "short_conv")
        with monkeypatch.context() as patch:
            broken = dataclasses.replace(backend, states_after=shifted)
            patch.setattr(PLAIN_CONV1D, "backends", Backends("shifted", broken))
            driver.sight(0, PROMPT)
        self.assert_is_seen(driver, get_oracle("short_conv"))

    @staticmethod
    def assert_is_seen(driver: HybridDriver, oracle) -> None:
        assert_equals_oracle(driver, 0, oracle)
        assert driver.sight(1, PROMPT) == 64
        with pytest.raises(AssertionError, match=r"logits of token|^token"):
            assert_equals_oracle(driver, 1, oracle)
        difference = driver.seen[1].logits[len(PROMPT)][0] - oracle.logits(PROMPT)[-1]
        assert not difference.abs().max() < 1e-3
