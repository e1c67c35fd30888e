"""Engines with attention in every layer of imported models: little memory, 16 bits, windows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.config.source import HfOverrides
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.layers import attention
from megatron_ext.models import build
from megatron_ext.models.load import LoadedModel
from megatron_ext.ops.paged_attention import reference
from megatron_ext.scheduling.record import RequestRecord
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import dense_oracle
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import engine_excess, excess, load_hf
from tests.unit_tests.models.huggingface.test_engine import PARAMS
from tests.unit_tests.support.caching import CachingDriver
from tests.unit_tests.support.driver import Driver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

NAMES = [shape.name for shape in dense_oracle.SHAPES]
BLOCK = 16
# Chunks of 48 tokens, and fewer blocks than all requests together want.
TIGHT = {"block_size": BLOCK, "block_count": 14, "max_requests": 8, "max_tokens": 48}
P95, MOST = math.log(1.05), math.log(1.2)  # of differences between log-probs in 16 bits


def play(driver: Driver) -> None:
    """A prompt, the same again, another end, the next turn of the chat, and others that want memory meanwhile."""
    prompt = oracle.prompt(100, seed=1)
    driver.add(0, prompt, num_tokens_to_generate=13)
    driver.run()
    answer = oracle.prompt(5, seed=3)
    driver.add(1, prompt, num_tokens_to_generate=13)
    driver.add(2, [*prompt[:70], *oracle.prompt(9, seed=2)], num_tokens_to_generate=13)
    driver.add(3, [*prompt, *driver.records[0].generated_tokens, *answer], num_tokens_to_generate=13)
    for request_id in (4, 5):
        driver.add(request_id, oracle.prompt(90, seed=request_id), num_tokens_to_generate=30)
    driver.run()


@pytest.mark.parametrize("name", long_except(("llama, biases of attention, yarn", "gpt-oss"), NAMES))
def test_warm_starts_in_little_memory_equal_transformers(name: str, denses) -> None:
    """FA-1, EX-1: chunked, with the cache on and off; some requests give up their blocks and begin again."""
    theirs, directory = denses(name)
    loaded = load_hf(directory)
    warm = CachingDriver(loaded.model, loaded.config, **TIGHT)
    cold = Driver(loaded.model, loaded.config, **TIGHT)
    play(warm)
    play(cold)
    assert sum(warm.skipped(*range(6))) >= 96 + 64 + 96
    for driver in (warm, cold):
        assert driver.fewest_free_blocks == 0
        assert sum(record.recomputed_token_count for record in driver.records.values()) > 0
        assert max(end - start for step in driver.steps for _, start, end in step) <= 48
        assert [engine_excess(driver, request_id, theirs) <= 1 for request_id in range(6)] == [True] * 6
    for request_id in range(6):
        assert warm.records[request_id].generated_tokens == cold.records[request_id].generated_tokens


def test_the_comparison_sees_lost_keys(denses) -> None:
    """Negative control: cached keys of one layer are zero."""
    theirs, directory = denses("qwen3")
    loaded = load_hf(directory)
    driver = CachingDriver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=400)
    prompt = oracle.prompt(100, seed=1)
    driver.add(0, prompt, num_tokens_to_generate=13)
    driver.run()
    driver.context.memory_buffer[0, 1] = 0.0
    driver.add(1, prompt, num_tokens_to_generate=13)
    driver.run()
    assert driver.skipped(1) == [96]
    assert engine_excess(driver, 0, theirs) <= 1
    assert engine_excess(driver, 1, theirs) > 10


# 16 bits

# One of each family whose layers differ; of experts, one whose routers do not waver.
NARROW = ("llama, biases of attention, yarn", "qwen2", "qwen3", "qwen3 moe", "mistral", "mixtral")


def _records(loaded: LoadedModel, cache: CacheConfig) -> list[RequestRecord]:
    """Six prompts that share three blocks, each twice."""
    batching = BatchingConfig(block_size=BLOCK, block_count=100, max_requests=4, max_tokens=64)
    engine = build_engine(loaded.model, loaded.config, loaded.tokenizer, batching, cache, dtype=loaded.dtype)
    system = oracle.prompt(53, seed=50)
    prompts = [[*system, *oracle.prompt(20 + seed, seed=seed)] for seed in range(6)]
    params = dataclasses.replace(PARAMS, skip_prompt_log_probs=True)
    return [record for _ in range(2) for record in engine.generate(prompts, params)]


def _differences(warm: list[RequestRecord], cold: list[RequestRecord]) -> torch.Tensor:
    """Differences of log-probs of generated tokens, up to the first token that differs."""
    found = []
    for one, other in zip(warm, cold, strict=True):
        pairs = zip(one.generated_tokens, other.generated_tokens, strict=True)
        equal = next((index for index, (a, b) in enumerate(pairs) if a != b), len(one.generated_tokens))
        log_probs = zip(one.generated_log_probs[:equal], other.generated_log_probs[:equal], strict=True)
        found += [abs(a - b) for a, b in log_probs]
    return torch.tensor(found)


@pytest.mark.parametrize("name", long_except(("qwen3", "mixtral"), NARROW))
@pytest.mark.long
def test_sixteen_bits(name: str, denses) -> None:
    """FA-1: cache on and off agree within the limits in bf16, with no more rounding than in transformers."""
    theirs, directory = denses(name)
    narrow = load_hf(directory, bf16=True)
    warm, cold = _records(narrow, CacheConfig()), _records(narrow, CacheConfig(enable_prefix_caching=False))
    assert min(record.skipped_prefill_token_count for record in warm[6:]) >= 64
    found = _differences(warm, cold)
    assert len(found) > 60
    assert found.quantile(0.95) <= P95
    assert found.max() <= MOST
    tokens = oracle.prompt(65, seed=0)
    their_narrow = type(theirs).from_pretrained(directory, dtype=torch.bfloat16).eval()
    exact = oracle.their_logits(theirs, tokens)
    error = (oracle.our_logits(narrow.model, tokens).float() - exact).abs().mean()
    assert error < 1.3 * (oracle.their_logits(their_narrow, tokens).float() - exact).abs().mean()


# Windows


def test_a_window_that_no_sequence_is_longer_than_has_no_effect(denses) -> None:
    """FA-4: the code without a window computes the output; one token more, and the window has an effect."""
    theirs, directory = denses("mistral, window")
    loaded = load_hf(directory, hf_overrides=HfOverrides.of({"sliding_window": 140}))
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.config, "sliding_window", None)
        assert excess(loaded.model, theirs, 140) <= 1
        assert excess(loaded.model, theirs, 200) > 10
        planner = reference._planner
        patch.setattr(reference, "_planner", lambda window: asked.append(window) or planner(window))
        driver = Driver(loaded.model, loaded.config, block_size=BLOCK)
        for request_id, count in enumerate((5, 13)):
            assert not any(asked)
            driver.add(request_id, oracle.prompt(135, seed=1), num_tokens_to_generate=count)
            driver.run()
            assert engine_excess(driver, 0, theirs) <= 1
    assert any(asked)


def test_the_engine_knows_the_window(denses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an operator that sees all keys, or one more than it should."""
    theirs, directory = denses("mistral, window")
    loaded = load_hf(directory)
    operator = attention.paged_attention
    for window in (None, 41):
        monkeypatch.setattr(
            attention,
            "paged_attention",
            lambda *args, wrong=window, **options: operator(*args, **options | {"window": wrong}),
        )
        driver = CachingDriver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=48)
        driver.add(0, oracle.prompt(100, seed=1), num_tokens_to_generate=8)
        driver.run()
        assert engine_excess(driver, 0, theirs) > 10


# Negative controls


YARN_NAME = "llama, biases of attention, yarn"


@pytest.mark.parametrize("field", ["rotary_magnitude", "yarn_rotary_scaling_factor"])
def test_both_forwards_know_the_magnitude(field: str, denses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: ours over blocks and upstream's over a whole prompt each read a setting of their own."""
    theirs, directory = denses(YARN_NAME)
    made = build.transformer_config
    monkeypatch.setattr(
        build, "transformer_config", lambda *args, **kwargs: dataclasses.replace(made(*args, **kwargs), **{field: 1.0})
    )
    loaded = load_hf(directory)
    driver = Driver(loaded.model, loaded.config, block_size=BLOCK)
    driver.add(0, oracle.prompt(100, seed=1), num_tokens_to_generate=4)
    driver.run()
    is_right = (engine_excess(driver, 0, theirs) <= 1, excess(loaded.model, theirs) <= 1)
    assert is_right == (field != "rotary_magnitude", field == "rotary_magnitude")
