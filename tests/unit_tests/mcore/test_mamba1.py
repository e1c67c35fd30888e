"""M1-1 to M1-4: Mamba-1 layers in the engine, in a hybrid with attention and alone; cache on equals cache off.

`HybridDriver` compares every admission, account, snapshot and KV write with token lists; the numbers here are literal.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, assert_snapshots_equal_oracle, build_driver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

KINDS = ["mamba1", "mamba1_only"]
MODES = ["kernel", "align"]
STEPS = [
    pytest.param({"max_tokens": 70}, id="chunked"),
    pytest.param({"max_tokens": 21}, id="small_chunks"),
    pytest.param({"max_tokens": 400}, id="whole"),
]
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


@pytest.fixture
def get_played(get_driver: Callable[..., Driver]) -> Callable[[str], Driver]:
    return functools.partial(play_off, get_driver)


@functools.cache
def play_off(get_driver: Callable[..., Driver], kind: str) -> Driver:
    return play(get_driver(kind, max_requests=8, max_tokens=70))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_a_full_recompute(get_played, get_oracle, kind):
    """M1-1: prefill in chunks, decode, several requests at once, without the cache; logits and states."""
    driver = get_played(kind)
    assert driver.engine.geometry.kernel_chunk == 32, "the model's own chunk"
    for request_id in range(7):
        assert_equals_oracle(driver, request_id, get_oracle(kind))


@pytest.mark.parametrize("batching", STEPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_on_equals_cache_off(get_oracle, get_played, kind, mode, batching):
    """M1-1, M1-3, HY-3, HY-4, HY-7, LA-1, LA-2: tokens, logits, states, snapshots, skipped tokens."""
    driver = play(build_driver(get_oracle, kind, mode=mode, max_requests=8, **batching))
    assert driver.engine.geometry.kernel_chunk == 32, "M1-4: the same as without"
    leaves_more = mode == "align" and batching["max_tokens"] < 2 * BLOCK  # a snapshot at every boundary, as chunks end
    assert driver.skipped(*range(7)) == [0, 64, 32 if leaves_more else 0, 0, 64, 32, 80]
    for request_id in range(7):
        assert_equals_oracle(driver, request_id, get_oracle(kind))
        off, on = (d.records[request_id].generated_tokens for d in (get_played(kind), driver))
        assert on == off
    assert assert_snapshots_equal_oracle(driver, PROMPT, get_oracle(kind))[-1] == 64
    assert assert_snapshots_equal_oracle(driver, BRANCH, get_oracle(kind))[-2:] == [48 if leaves_more else 32, 64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_at_every_length(get_oracle, kind, mode):
    """HY-3: second and third sighting of N*b + {-1, 0, 1, 2, 3} tokens."""
    driver = build_driver(get_oracle, kind, mode=mode, max_requests=8, max_tokens=2 * BLOCK + 3)
    for offset in (-1, 0, 1, 2, 3):
        prompt, first = make_prompt(3 * BLOCK + offset, seed=offset), 10 * (offset + 1)
        assert driver.sight(first, prompt) == 0
        assert driver.sight(first + 1, prompt) == (48 if offset > 0 else 32)
        assert driver.sight(first + 2, [*prompt, *make_prompt(9, seed=7)]) == (32 if offset < 0 else 48)
        for request_id in range(first, first + 3):
            assert_equals_oracle(driver, request_id, get_oracle(kind))


def test_blocks_of_a_model_without_attention_only_carry_the_index(get_oracle):
    """M1-1, HY-2: they take no memory; the budget is for states alone, and prompts are skipped nevertheless."""
    driver = build_driver(get_oracle, "mamba1_only", block_count=None, buffer_size_gb=0.01, max_requests=4)
    geometry = driver.engine.geometry
    assert (geometry.block_bytes, geometry.state_in_kv_tokens) == (0, None)
    channels, states, layers, window = 96, 8, 2, 3
    assert geometry.state_bytes == layers * channels * (states + window - 1) * 4
    assert geometry.blocks == 4 * 2048 // BLOCK
    assert driver.sight(0, PROMPT) == 0
    assert driver.sight(1, PROMPT) == 64


class TestNegativeControls:
    """Negative controls: layers broken in one way must fail the comparison, or the numbers above show nothing."""

    @pytest.mark.parametrize("which", ["conv", "ssm"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_zeroed_slot(self, get_oracle, kind, which):
        """Zero one kind of state of one layer in all snapshots."""
        driver = build_driver(get_oracle, kind)
        driver.sight(0, PROMPT)
        getattr(driver.context.snapshots, which)[1] = 0.0
        assert driver.sight(1, PROMPT) == 64
        assert_equals_oracle(driver, 0, get_oracle(kind))
        self.assert_is_seen(driver, get_oracle(kind))

    def test_a_state_of_a_chunk_before(self, get_oracle, monkeypatch):
        """The scan gives each chunk the state at the end of the one before."""
        with SELECTIVE_SCAN.backends.forced("reference"):
            backend = SELECTIVE_SCAN.backends.choose(torch.empty(0))

        def shifted(*args: object, **kwargs: object) -> object:
            scanned = backend.scan(*args, **kwargs)
            return scanned._replace(chunk_states=scanned.chunk_states.roll(1, dims=0))

        driver = build_driver(get_oracle, "mamba1")
        with monkeypatch.context() as patch:
            patch.setattr(SELECTIVE_SCAN, "backends", Backends("shifted", dataclasses.replace(backend, scan=shifted)))
            driver.sight(0, PROMPT)
        assert driver.sight(1, PROMPT) == 64
        self.assert_is_seen(driver, get_oracle("mamba1"))

    @staticmethod
    def assert_is_seen(driver: HybridDriver, oracle) -> None:
        with pytest.raises(AssertionError, match=r"logits of token|^token"):
            assert_equals_oracle(driver, 1, oracle)
        difference = driver.seen[1].logits[len(PROMPT)][0] - oracle.logits(PROMPT)[-1]
        assert not difference.abs().max() < 1e-3


def test_the_oracle_has_a_long_memory(get_oracle):
    """States that the first block left decide the logits 130 tokens later, without any attention."""
    oracle, tokens = get_oracle("mamba1_only"), make_prompt(150)
    changed = [*make_prompt(BLOCK, seed=8), *tokens[BLOCK:]]
    assert (oracle.logits(tokens)[-1] - oracle.logits(changed)[-1]).abs().max() > 1e-2
