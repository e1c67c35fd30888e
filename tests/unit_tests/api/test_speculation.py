"""Engines that draft, as a program loads them: by n-grams, and by layers of multi-token prediction (SP-1, SP-10)."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_ext import RequestParams
from megatron_ext.config import ModelConfig
from megatron_ext.mcore.hidden_states import KEPT_TOKENS
from megatron_ext.models.build import build_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint

PROMPT = "The import statement combines two operations; it searches for the named module, " * 3
SETTINGS = {"speculative_adaptive": False, "num_speculative_tokens": 3, "num_tokens_to_generate": 24}


WISHES = ({}, {"temperature": 1.0, "seed": 3}, {"num_speculative_tokens": 0})


def generate(engine, wishes=WISHES):
    return engine.generate([PROMPT] * len(wishes), [RequestParams(24, **one) for one in wishes])


def wishes_without_speculation():
    return [{name: value for name, value in one.items() if name != "num_speculative_tokens"} for one in WISHES]


@pytest.fixture(scope="module")
def plain(engine):
    return [record.generated_tokens for record in generate(engine, wishes_without_speculation())]


def test_prompt_lookup(load, plain):
    """SP-1, SP-7: greedy and sampled tokens equal those without drafts; a request that turns drafts off gets none."""
    engine = load(speculative_method="ngram", speculative_ngram_shortest=1, **SETTINGS)
    records = generate(engine)
    assert [record.generated_tokens for record in records] == plain
    assert records[0].draft_token_count > 0
    assert (records[2].draft_token_count, records[2].accepted_token_count) == (0, 0)
    use = engine.statistics().speculation
    assert sum(use.drafted) == sum(record.draft_token_count for record in records)
    assert sum(use.accepted) == sum(record.accepted_token_count for record in records)


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """A saved model with a layer of multi-token prediction, and one with two of their own."""
    found = []
    for repeated in (True, False):
        config = ModelConfig(
            hybrid_override_pattern="M*-",
            hidden_size=64,
            num_attention_heads=4,
            mamba_num_groups=2,
            vocab_size=300,
            mtp_num_layers=2,
            mtp_use_repeated_layer=repeated,
            mtp_hybrid_override_pattern="*-",
        )
        found.append(str(tmp_path_factory.mktemp("mtp") / "model"))
        save_dist_checkpoint(found[-1], build_model(config, device=torch.device("cpu")), config)
    return found


def test_the_model_s_own_layer(load, predicting):
    """SP-10: it is read for this method; tokens are those without it, by one setting and by another."""
    source = {"load": predicting[0], "tokenizer_type": "NullTokenizer"}
    prompts, wishes = [[5, 9, 40] * 20] * 2, [RequestParams(24), RequestParams(24, temperature=1.0, seed=3)]
    expected = [record.generated_tokens for record in load(**source).generate(prompts, wishes)]
    for method, adaptive in (("mtp", {}), (None, {"speculative_adaptive": True, "speculative_draft_cost": 0.1})):
        settings = SETTINGS | adaptive  # the second by Megatron's flag alone
        engine = load(speculative_method=method, **source, **settings)
        records = engine.generate(prompts, wishes)
        assert [record.generated_tokens for record in records] == expected
        assert records[0].draft_token_count > 0
        pools = engine.inference_engine.context.plan.geometry.draft_layers
        assert pools.hidden_bytes == engine.inference_engine.context.max_requests * KEPT_TOKENS * 64 * 4


def test_a_layer_that_fails_costs_its_drafts(load, predicting, monkeypatch, caplog):
    """SP-1: an exception, as for want of memory, is logged once, and no request is affected."""
    source = {"load": predicting[0], "tokenizer_type": "NullTokenizer"}
    prompts, wishes = [[5, 9, 40] * 20] * 2, [RequestParams(24), RequestParams(24, temperature=1.0, seed=3)]
    expected = [record.generated_tokens for record in load(**source).generate(prompts, wishes)]
    engine = load(speculative_method="mtp", **source, **SETTINGS)
    layer, turns = engine.inference_engine.context.drafting._layer, itertools.count()
    compute = layer._execute

    def fails_often(step, inputs):
        if next(turns) % 3:
            raise MemoryError("no memory for this step")
        return compute(step, inputs)

    monkeypatch.setattr(layer, "_execute", fails_often)
    records = engine.generate(prompts, wishes)
    assert [record.generated_tokens for record in records] == expected
    assert [message for message in caplog.messages if "drafter" in message] == [
        "the drafter failed; the engine continues"
    ]
