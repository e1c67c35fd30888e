"""PY-3: samples of a prompt in one call: the prompt is computed once, and tokens and log-probs are those without it."""

from __future__ import annotations

import pytest

from megatron_ext import LoadedEngine, RequestParams
from tests.unit_tests.api.conftest import SMALL

PROMPT = list(range(5, 45))  # two blocks and a half
PARAMS = [
    RequestParams(
        num_tokens_to_generate=12,
        temperature=1.0,
        seed=seed,
        ignore_eos=True,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        repetition_penalty=1.2 if seed == 3 else 1.0,
    )
    for seed in range(8)
]


def computed(engine: LoadedEngine) -> int:
    return engine.statistics().counters.prefill_tokens


def test_samples_are_those_of_requests_alone(engine):
    alone = []
    for params in PARAMS:
        engine.reset_prefix_cache()
        alone += engine.generate(PROMPT, params)
    engine.reset_prefix_cache()
    before = computed(engine)
    together = engine.generate([PROMPT] * 8, PARAMS)
    assert computed(engine) - before == len(PROMPT)
    assert len({record.generated_tokens for record in together}) > 4
    for one, other in zip(together, alone, strict=True):
        assert one.generated_tokens == other.generated_tokens
        assert one.generated_log_probs == pytest.approx(other.generated_log_probs, abs=1e-4)


def test_opted_out(engine):
    """EX-2: a request that does not use the cache computes its own prompt."""
    params = [RequestParams(num_tokens_to_generate=2, enable_prefix_caching=False)] * 2
    assert [one.computed_prefill_token_count for one in engine.generate([PROMPT] * 2, params)] == [40, 40]


def test_explanations(load):
    """SI-5: a sample that took over a prompt skipped all of it."""
    engine = load(explain_prefix_cache=True)
    records = engine.generate([PROMPT] * 2, RequestParams(num_tokens_to_generate=2))
    assert [one.prefix_cache_explanation.skipped for one in records] == [0, 40]
    assert records[1].prefix_cache_explanation.reason == "skipped_all"
    assert SMALL["inference_dynamic_batching_block_size"] == 16
