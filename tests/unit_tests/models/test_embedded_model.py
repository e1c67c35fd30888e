"""The shipped language model: what it has learnt, measured on its file; and the script that made it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import NemotronHForCausalLM

from examples.embedded_model import corpus, export, head, train
from examples.embedded_model.evaluation import (
    EVALUATION_LENGTH,
    both_logits,
    encode_documents,
    held_out_tokens,
    language_model_loss,
    positions,
    unigram_entropy,
    windows,
)
from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.config.differences import EMBEDDED_CONFIG, EMBEDDED_MODEL_DIR
from megatron_ext.models.build import build_model
from megatron_ext.models.huggingface.export import save_hf_checkpoint
from megatron_ext.models.huggingface.hf_checkpoint import read_hf_config, with_prediction
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.text.tokenizer import TextTokenizer
from tests.unit_tests.models.huggingface.oracles import excess
from tests.unit_tests.support.prediction import prediction_logits

ROOT = Path(__file__).parents[3]
MEASURED_WINDOWS = 4
BATTERY = (
    "",
    "a",
    "def f(x):\n\treturn x  # \u00e9\u4e2d\U0001f600\n",
    "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>",
)


@pytest.fixture(scope="module")
def shipped() -> LoadedModel:
    return load_model(SourceConfig(), {}, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def held_out(shipped: LoadedModel) -> tuple[Tensor, Tensor]:
    """Inputs and targets of windows spread evenly over the held-out documents."""
    inputs, targets = windows(held_out_tokens(shipped.tokenizer), EVALUATION_LENGTH)
    assert len(inputs) >= MEASURED_WINDOWS
    rows = torch.linspace(0, len(inputs) - 1, MEASURED_WINDOWS).long()
    return inputs[rows], targets[rows]


@pytest.fixture(scope="module")
def loss(shipped: LoadedModel, held_out: tuple[Tensor, Tensor]) -> float:
    return language_model_loss(shipped.model, *held_out)


def test_it_is_a_small_hybrid(shipped: LoadedModel) -> None:
    parameters = sum(parameter.numel() for parameter in shipped.model.parameters())
    assert 2_000_000 <= parameters <= 4_000_000
    assert with_prediction(read_hf_config(EMBEDDED_MODEL_DIR), EMBEDDED_MODEL_DIR) == EMBEDDED_CONFIG
    assert set(EMBEDDED_CONFIG.hybrid_override_pattern) == {"M", "*", "-"}
    assert (EMBEDDED_MODEL_DIR / "model.safetensors").stat().st_size <= 10_000_000


def test_transformers_computes_the_same(shipped: LoadedModel) -> None:
    """EM-20: many step sizes are below the least one that transformers takes by default."""
    theirs = NemotronHForCausalLM.from_pretrained(EMBEDDED_MODEL_DIR, dtype=torch.float32).eval()
    assert excess(shipped.model, theirs) <= 1
    for layer in theirs.model.layers:  # the control
        layer.mixer.time_step_limit = (0.001, math.inf)
    assert excess(shipped.model, theirs) > 100


@pytest.mark.long
def test_it_knows_a_nat_more_than_any_unigram_model(loss: float, held_out: tuple[Tensor, Tensor]) -> None:
    """EM-20: in nats per token."""
    assert loss <= unigram_entropy(held_out[1].flatten()) - 1.0


def test_it_needs_its_mamba_states(shipped: LoadedModel, loss: float, held_out: tuple[Tensor, Tensor]) -> None:
    assert language_model_loss(shipped.model, *held_out, zero_states_every=64) >= loss + 0.05


def test_untrained_weights_of_its_shape_would_fail(loss: float, held_out: tuple[Tensor, Tensor]) -> None:
    """Negative control: the loss is not low because of how it is measured."""
    untrained = build_model(EMBEDDED_CONFIG, device=torch.device("cpu"))
    assert language_model_loss(untrained, held_out[0][:1], held_out[1][:1]) > loss + 2


def test_the_tokenizer_gives_every_text_back(shipped: LoadedModel) -> None:
    tokenizer = shipped.tokenizer
    assert tokenizer.vocab_size == EMBEDDED_CONFIG.vocab_size == 4096
    for text in (*BATTERY, corpus.held_out_documents()[0].text):
        assert tokenizer.detokenize(tokenizer.tokenize(text), skip_special_tokens=False) == text
    assert [tokenizer.tokenize(marker) for marker in train.SPECIAL_TOKENS] == [
        [index] for index in range(len(train.SPECIAL_TOKENS))
    ]


@pytest.mark.long
def test_no_held_out_paragraph_is_trained_on() -> None:
    held_out, training = corpus.held_out_documents(), corpus.training_documents()
    assert not {document.name for document in held_out} & {document.name for document in training}
    known = set(_long_paragraphs([document.text for document in training] + corpus.chat_documents(training)))
    assert not known & set(_long_paragraphs([document.text for document in held_out]))
    characters = [sum(len(document.text) for document in documents) for documents in (held_out, training)]
    assert 0.01 <= characters[0] / sum(characters) <= 0.1


def _long_paragraphs(texts: list[str]) -> list[str]:
    parts = (" ".join(part.split()) for text in texts for part in corpus.paragraphs(text))
    return [part for part in parts if len(part) >= corpus.DUPLICATE_LENGTH]


def _random_tokens(count: int) -> Tensor:
    return torch.randint(50, (count,), generator=torch.Generator().manual_seed(0))


def test_cut_states_see_nothing_before_the_cut(tiny_config: ModelConfig) -> None:
    """Windows cut every n tokens equal windows of n tokens, without attention."""
    model = build_model(replace(tiny_config, hybrid_override_pattern="M-M"), seed=3)
    tokens = _random_tokens(129)
    cut = language_model_loss(model, *windows(tokens, 64), zero_states_every=16)
    assert cut == pytest.approx(language_model_loss(model, *windows(tokens, 16)), abs=1e-6)
    assert cut != pytest.approx(language_model_loss(model, *windows(tokens, 64)), abs=1e-6)


@pytest.fixture
def training(tiny_config: ModelConfig):
    """Makes equal trainings of a tiny model, and its batches."""
    recipe = train.Recipe(steps=6, decay_steps=2, batch_size=2, length=32, warmup_steps=2)
    tokenizer = train.train_tokenizer(["some words to count"], vocabulary=270)

    def make(**changes):
        model = build_model(tiny_config, seed=recipe.seed)
        return train.Training(tiny_config, replace(recipe, **changes), tokenizer, model)

    return make, train.Batches(_random_tokens(400), recipe)


def test_an_interrupted_training_goes_on_exactly(training, tmp_path: Path) -> None:
    make, batches = training
    straight = make()
    losses = [straight.advance(batches) for _ in range(6)]
    assert losses[-1] < losses[0]
    interrupted = make()
    for _ in range(3):
        interrupted.advance(batches)
    interrupted.save(tmp_path / "state.pt")
    resumed = make()
    resumed.load(tmp_path / "state.pt")
    assert [resumed.advance(batches) for _ in range(3)] == losses[3:]
    for (name, expected), (_, found) in zip(
        straight.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(expected, found), name


def test_exported_and_measured(shipped: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is a checkpoint that loads; exporting again replaces it, and stages add up."""
    monkeypatch.setattr(export, "held_out_tokens", lambda _: _random_tokens(600))
    monkeypatch.setattr(export, "tools", lambda _: [export.Row("calls", "50.0%")])
    tokenizer = train.Tokenizer.from_file(str(EMBEDDED_MODEL_DIR / "tokenizer.json"))
    tiny = replace(train.MODEL, hybrid_override_pattern="M*", hidden_size=32)
    state = train.Training(tiny, train.Recipe(), tokenizer, build_model(tiny))
    trunk, both = tmp_path / "trunk", tmp_path / "both"
    for _ in range(2):
        train.export(state, trunk, "the trunk", 0, None)
    loaded = load_model(SourceConfig(load_hf=str(trunk)), {}, device=torch.device("cpu"))
    tokens = encode_documents(["Some words."], TextTokenizer(trunk).tokenize, 0)[None]
    expected = state.model.bfloat16().float()(tokens, positions(tokens), None)
    torch.testing.assert_close(loaded.model(tokens, positions(tokens), None), expected, atol=1e-2, rtol=1e-2)

    with_head = head.HeadTraining(trunk, replace(head.RECIPE, batch_size=1, length=16))
    train.export(with_head, both, "the head", 0, trunk)
    card = (both / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# The embedded model")
    assert re.findall("^## .*$", card, re.MULTILINE) == ["## Stage: the trunk", "## Stage: the head"]
    assert "| calls | 50.0% |" in card
    template = "chat_template.jinja"
    assert (both / template).read_bytes() == (export.EMBEDDED_MODEL_DIR / template).read_bytes()


def test_what_opens_a_thinking_turn_is_given_and_not_learned() -> None:
    """EM-21: so the model does not think unasked; calls, which begin with the same token, are learned."""
    tokenizer = train.Tokenizer.from_file(str(EMBEDDED_MODEL_DIR / "tokenizer.json"))
    texts = ["<|end|><|assistant|><think>\nWell.", "<|assistant|><tool_call>\n{", "<think>"]
    ids = [token for text in texts for token in tokenizer.encode(text).ids]
    begin = tokenizer.encode("<|assistant|><think>").ids
    marked = train.after_first(torch.tensor([ids, ids[::-1]]), begin)
    assert marked[0].nonzero().flatten().tolist() == list(range(2, 1 + len(begin)))
    assert not marked[1].any()
    state = train.Training(train.MODEL, train.Recipe(), tokenizer, build_model(train.MODEL, seed=1))
    tokens = torch.tensor([ids])
    others = tokens.clone()
    others[0, 3] = 7  # breaks the begin
    with torch.no_grad():
        assert state.loss(tokens[:, :-1], tokens[:, 1:]) != state.loss(tokens[:, :-1], others[:, 1:])
        logits = state.model(tokens[:, :-1], positions(tokens[:, :-1]), None)
        each = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="none")
        learned = each[~marked[0, 1:]].mean()
        torch.testing.assert_close(state.loss(tokens[:, :-1], tokens[:, 1:]), learned)


def test_only_the_head_is_trained(tmp_path: Path) -> None:
    """EM-22: the trunk keeps its weights, and the head comes closer to the trunk."""
    tiny = replace(train.MODEL, hybrid_override_pattern="M*", hidden_size=32)
    save_hf_checkpoint(tmp_path / "trunk", build_model(tiny, seed=1), tiny, EMBEDDED_MODEL_DIR)
    recipe = replace(head.RECIPE, steps=8, decay_steps=2, batch_size=2, length=32, warmup_steps=2)
    training = head.HeadTraining(tmp_path / "trunk", recipe)
    before = {name: parameter.clone() for name, parameter in training.model.named_parameters()}
    batches = train.Batches(_random_tokens(400), recipe)
    losses = [training.advance(batches) for _ in range(8)]
    assert losses[-1] < losses[0]
    for name, parameter in training.model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith("mtp."), name


def test_the_heads_target_is_the_trunk_one_token_later(tiny_config: ModelConfig) -> None:
    """EM-22: the distributions that the loss compares are those of the same token."""
    model = build_model(head.with_prediction(tiny_config), seed=3)
    tokens = _random_tokens(12)[None]
    trunk, drafted = both_logits(model, tokens)
    torch.testing.assert_close(trunk, model(tokens, positions(tokens), None)[:, 1:])
    torch.testing.assert_close(drafted, prediction_logits(model, tokens, 1)[0])
