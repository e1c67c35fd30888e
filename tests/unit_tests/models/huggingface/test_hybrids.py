"""Engines with imported recurrent and hybrid models: every boundary, pressure, cache on and off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel
from megatron_ext.scheduling.record import RequestRecord
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import hybrid_oracle
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import engine_excess, load_hf
from tests.unit_tests.support.hybrid_caching import HybridDriver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

BLOCK = 16
# Of each family the last shape: what is special is in it.
LAST = list({shape.family: shape.name for shape in hybrid_oracle.SHAPES}.values())


@pytest.mark.parametrize("mode", long_except(["kernel"], ["kernel", "align"]))
@pytest.mark.parametrize("name", long_except(LAST[:1], LAST))
def test_every_boundary(name: str, mode: str, hybrids) -> None:
    """FA-1, HY-3: a snapshot at each boundary of one prompt, and a sighting that resumes from each of them."""
    theirs, directory = hybrids(name)
    loaded, prompt = load_hf(directory), oracle.prompt(4 * BLOCK + 3, seed=5)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=400, max_requests=8, mode=mode)
    boundaries = range(BLOCK, len(prompt), BLOCK)
    for number, end in enumerate(boundaries):
        driver.sight(number, [*prompt[:end], 5], num_tokens_to_generate=1)
    assert driver.snapshots_of(prompt) == list(boundaries)
    for number, end in enumerate(boundaries):
        assert driver.sight(10 + number, [*prompt[: end + 2], *oracle.prompt(5, seed=number)]) == end
        assert engine_excess(driver, 10 + number, theirs) <= 1


@pytest.mark.parametrize("name", long_except(LAST[:1], LAST))
def test_under_pressure(name: str, hybrids) -> None:
    """FA-1, HY-5: too few blocks for all, one slot: requests are preempted and resume; tokens are those without."""
    theirs, directory = hybrids(name)
    loaded = load_hf(directory)
    driver = HybridDriver(
        loaded.model, loaded.config, block_size=BLOCK, block_count=9, slots=1, max_tokens=40, max_requests=4
    )
    prompts = [[*oracle.prompt(37, seed=1), *oracle.prompt(9 * number, seed=number)] for number in range(4)]
    for number, prompt in enumerate(prompts):
        driver.add(number, prompt, num_tokens_to_generate=20)
    driver.run()
    use = driver.scheduler.cache.use()
    assert use.blocks_evicted or any(record.recomputed_token_count for record in driver.records.values())
    for number, prompt in enumerate(prompts):
        assert engine_excess(driver, number, theirs) <= 1, len(prompt)


def serve(loaded: LoadedModel, prompts: Sequence[Sequence[int]], *, is_cached: bool) -> list[RequestRecord]:
    """The first one alone, which leaves its blocks and states, then the others together."""
    batching = BatchingConfig(block_size=BLOCK, block_count=200, max_requests=8, max_tokens=64)
    cache = CacheConfig(enable_prefix_caching=is_cached, snapshot_slots=20 if is_cached else None)
    engine = build_engine(loaded.model, loaded.config, loaded.tokenizer, batching, cache, dtype=loaded.dtype)
    wanted = RequestParams(num_tokens_to_generate=10, return_log_probs=True, skip_prompt_log_probs=True)
    return [record for batch in (prompts[:1], prompts[1:]) for record in engine.generate(batch, wanted)]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", long_except(LAST[:1], LAST))
def test_cache_on_beside_off(name: str, bf16: bool, hybrids) -> None:
    """FA-1, HY-14: greedy tokens are equal in fp32, and within the documented limits in 16 bits."""
    loaded = load_hf(hybrids(name)[1], bf16=bf16)
    prompt = oracle.prompt(70, seed=1)
    prompts = [prompt, *([*prompt[: 64 + number], *oracle.prompt(7, seed=number)] for number in range(5))]
    off, on = (serve(loaded, prompts, is_cached=is_cached) for is_cached in (False, True))
    assert sum(record.skipped_prefill_token_count for record in on) == 5 * 64
    gaps = torch.tensor([gap for pair in zip(off, on, strict=True) for gap in log_prob_gaps(*pair)])
    assert len(gaps) > 30
    if not bf16:
        assert [one.generated_tokens for one in on] == [one.generated_tokens for one in off]
        assert gaps.max() <= 1e-3
    assert gaps.quantile(0.95) <= math.log(1.05)
    assert gaps.max() <= math.log(1.2)


def log_prob_gaps(one: RequestRecord, other: RequestRecord) -> list[float]:
    """Absolute differences of log-probs before the first token that differs."""
    tokens = zip(one.generated_tokens, other.generated_tokens, strict=True)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], tokens)
    return [abs(a - b) for a, b, _ in zip(one.generated_log_probs, other.generated_log_probs, same, strict=False)]
