"""Engines that draft, as a program loads them: n-grams, and the embedded model as its own draft model (SP-1)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_ext import ConfigError, RequestParams
from megatron_ext.config import ModelConfig, ParallelConfig, SourceConfig
from megatron_ext.config.embedded import EMBEDDED_MODEL_DIR
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.mcore.hidden_states import KEPT_TOKENS
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model
from megatron_ext.models.load_draft_model import check_prediction, check_same_vocabulary, load_draft_model
from megatron_ext.models.native.safetensors_checkpoint import save_checkpoint
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.tokenizers import PieceTokenizer

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


def test_a_draft_model(load, plain):
    """SP-1: a model that drafts for itself is right each time, also after the pools were freed."""
    engine = load(speculative_method="draft_model", speculative_load=str(EMBEDDED_MODEL_DIR), **SETTINGS)
    for _ in range(2):
        records = generate(engine)
        assert [record.generated_tokens for record in records] == plain
        greedy = records[0]
        assert greedy.draft_token_count == greedy.accepted_token_count > 12
        engine.suspend()
        engine.resume()


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
        save_checkpoint(found[-1], build_model(config, device=torch.device("cpu")), config)
    return found


def test_the_model_s_own_layer(load, predicting):
    """SP-10: it is read for this method; tokens are those without it, by one setting and by another."""
    source = {"load": predicting[0], "tokenizer_type": "NullTokenizer"}
    prompts, wishes = [[5, 9, 40] * 20] * 2, [RequestParams(24), RequestParams(24, temperature=1.0, seed=3)]
    expected = [record.generated_tokens for record in load(**source).generate(prompts, wishes)]
    for method, adaptive in (("mtp", False), (None, True)):  # of Megatron's flag alone
        settings = SETTINGS | {"speculative_adaptive": adaptive}
        engine = load(speculative_method=method, **source, **settings)
        records = engine.generate(prompts, wishes)
        assert [record.generated_tokens for record in records] == expected
        assert records[0].draft_token_count > 0
        pools = engine._engine.context.plan.geometry.draft_model
        assert pools.hidden_bytes == engine._engine.context.max_requests * KEPT_TOKENS * 64 * 4


def test_a_model_without_such_a_layer_is_refused(load, predicting, tmp_path):
    """SP-10: with what would do."""
    settings = {"speculative_method": "mtp", "num_speculative_tokens": 2}
    config = ModelConfig(hybrid_override_pattern="M*-", hidden_size=64, vocab_size=64, mamba_head_dim=16)
    save_checkpoint(tmp_path / "plain", build_model(config, seed=1), config)
    with pytest.raises(ConfigError, match=r"needs layers of multi-token prediction, and .*plain has none"):
        load(load=str(tmp_path / "plain"), tokenizer_type="NullTokenizer", **settings)
    settings["num_speculative_tokens"] = 3
    with pytest.raises(ConfigError, match=r"-tokens 3 is more than the 2 layers .* give --num-speculative-tokens 2"):
        load(load=predicting[1], tokenizer_type="NullTokenizer", **settings)


def test_layouts_that_cannot_draft_are_refused():
    """SP-13: with what would do; all else goes on."""
    speculation = SpeculationConfig(speculative_method="mtp", num_speculative_tokens=2)
    parallel = ParallelConfig(expert_model_parallel_size=2)
    loaded, with_experts = (
        SimpleNamespace(name="a model", config=SimpleNamespace(mtp_pattern=pattern, mtp_layer_count=1))
        for pattern in ("*-", "*E")
    )
    check_prediction(speculation, parallel, loaded)
    check_prediction(speculation, ParallelConfig(pipeline_model_parallel_size=2), with_experts)
    with pytest.raises(ConfigError, match=r"expert-model-parallel-size 2 contradict .* experts") as error:
        check_prediction(speculation, parallel, with_experts)
    assert "--speculative-method ngram" in str(error.value)


def test_a_draft_model_that_fails_costs_its_drafts(load, plain, monkeypatch, caplog):
    """SP-1: an exception, as for want of memory, is logged once, and no request is affected."""
    engine = load(speculative_method="draft_model", speculative_load=str(EMBEDDED_MODEL_DIR), **SETTINGS)
    model, turns = engine._engine.context.drafting._model, itertools.count()
    compute = model._execute

    def fails_often(step):
        if next(turns) % 3:
            raise MemoryError("no memory for this step")
        return compute(step)

    monkeypatch.setattr(model, "_execute", fails_often)
    records = generate(engine)
    assert [record.generated_tokens for record in records] == plain
    assert [message for message in caplog.messages if "drafter" in message] == [
        "the drafter failed; the engine continues"
    ]


def test_costs_are_measured_and_nothing_is_counted(load, plain, caplog):
    """SP-6: measuring the costs leaves no trace in counts and cache."""
    caplog.set_level("INFO")
    settings = SETTINGS | {"speculative_adaptive": True, "inference_dynamic_batching_max_requests": 2}
    engine = load(speculative_method="ngram", speculative_measure_costs=True, **settings)
    (line,) = [message for message in caplog.messages if "measured cost of drafts" in message]
    assert [int(row.split(":")[0]) for row in line.split("--speculative-cost-table ")[1].split(",")] == [1, 2]
    statistics = engine.statistics()
    assert (statistics.steps, statistics.ended, sum(statistics.speculation.drafted)) == (0, 0, 0)
    assert statistics.counters.prefill_tokens == statistics.use.blocks_cached == 0
    assert [record.generated_tokens for record in generate(engine)] == plain


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"speculative_method": "ngram"}, "--speculative-method ngram needs --num-speculative-tokens"),
        (
            {"speculative_method": "ngram", "num_speculative_tokens": 2, "speculative_cost_table": "nowhere.txt"},
            "nowhere.txt",
        ),
        (
            {"speculative_method": "draft_model", "num_speculative_tokens": 2, "speculative_load": "nowhere"},
            "the draft model: --load nowhere does not exist",
        ),
    ],
)
def test_impossible_settings_are_refused_at_the_start(load, settings, expected):
    with pytest.raises(ConfigError, match=expected):
        load(**settings)


def tokenizer_of(size, pieces=None):
    tokenizer = PieceTokenizer(size, pieces)
    tokenizer.token_ids = range(size)
    return tokenizer


def test_vocabularies_are_compared():
    """SP-1: ids must mean the same to both models."""
    large = tokenizer_of(20)
    check_same_vocabulary(large, tokenizer_of(20), "draft")
    check_same_vocabulary(NullTokenizer(9), NullTokenizer(9), "draft")
    with pytest.raises(ConfigError, match="draft has 12 tokens, the large one 20; of id 12 it has no token for it"):
        check_same_vocabulary(large, tokenizer_of(12), "draft")
    with pytest.raises(ConfigError, match="draft has 20 tokens, the large one 12; of id 12 it has one, and the large"):
        check_same_vocabulary(tokenizer_of(12), large, "draft")
    with pytest.raises(ConfigError, match="draft has no tokenizer to compare"):
        check_same_vocabulary(large, NullTokenizer(20), "draft")
    other = tokenizer_of(20, {7: "!"})
    with pytest.raises(ConfigError, match="draft token 7 is '!' in the draft model and '<7>' in the large model"):
        check_same_vocabulary(large, other, "draft")


class WithSpecial(PieceTokenizer):
    """Token 3 is a special one, which texts do without."""

    token_ids = range(20)

    def detokenize(self, ids, skip_special_tokens=True):
        return super().detokenize([i for i in ids if i != 3 or not skip_special_tokens])


def test_special_tokens_are_compared():
    """SP-1: an end of turn is not the beginning of one, although both read as nothing."""
    large = WithSpecial(20, {3: "<end>"})
    check_same_vocabulary(large, WithSpecial(20, {3: "<end>"}), "draft")
    with pytest.raises(ConfigError, match="token 3 is '<begin>' in the draft model and '<end>' in the large model"):
        check_same_vocabulary(large, WithSpecial(20, {3: "<begin>"}), "draft")


@pytest.mark.parametrize(
    ("types", "dtype"), [({}, "float32"), ({"bf16": True}, "bfloat16"), ({"fp16": True}, "float16")]
)
def test_a_draft_model_computes_in_the_type_of_the_large_one(types, dtype):
    """SP-1: the budget, and what is told of both, count on it."""
    source = SourceConfig(**types)
    loaded = load_model(source, {})
    speculation = SpeculationConfig(
        speculative_method="draft_model", speculative_load=str(EMBEDDED_MODEL_DIR), num_speculative_tokens=2
    )
    parts = load_draft_model(speculation, source, ParallelConfig(), loaded)
    assert parts.dtype == loaded.dtype == getattr(torch, dtype)
    assert parts.model.embedding.word_embeddings.weight.dtype == loaded.dtype
