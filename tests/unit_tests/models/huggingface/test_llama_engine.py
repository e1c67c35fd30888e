"""Engine with an imported Llama: positions of chunks and decodes, and how texts begin."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import context
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.offline.prompts import Prompt, tokenize_prompts
from megatron_ext.runner.recorded_steps import RecordedSteps
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.test_engine import (
    CHUNKED,
    GENERATED,
    import_model,
    outside,
    serve,
)
from tests.unit_tests.support import hf_tokenizers


@pytest.mark.parametrize(
    "wrong",
    [
        lambda positions: positions % 48,  # as if each chunk began at zero
        lambda positions: positions.clamp(max=63),  # as if decoding did not go on counting
        lambda positions: torch.zeros_like(positions),
    ],
    ids=["restarted", "stopped", "none"],
)
def test_comparison_sees_wrong_positions(wrong, llamas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: relative positions that are right in the first chunk only, and never."""
    theirs, directory = llamas("mha")
    rotation_at = context.rotation_at
    monkeypatch.setattr(context, "rotation_at", lambda angles, at, *rest: rotation_at(angles, wrong(at), *rest))
    for record in serve(import_model(directory), CHUNKED, [oracle.prompt(length, seed=length) for length in (65, 129)]):
        assert outside(record, lambda tokens: oracle.their_logits(theirs, tokens)) != []


def test_rotation_is_computed_once_a_step(llamas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers compute neither the table of all positions nor cosines again."""
    monkeypatch.setattr(RecordedSteps, "stage", lambda *_: None)  # a repeated step runs no Python code
    tables, rotations = [], []
    get_emb, rotation_at = RotaryEmbedding.get_emb, context.rotation_at
    monkeypatch.setattr(RotaryEmbedding, "get_emb", lambda *args: tables.append(1) or get_emb(*args))
    monkeypatch.setattr(context, "rotation_at", lambda *args: rotations.append(1) or rotation_at(*args))
    loaded = import_model(llamas("gqa, tied")[1])
    record = serve(loaded, CHUNKED, [oracle.prompt(129, seed=1)])[0]
    assert record.step_count >= GENERATED
    assert (len(tables), len(rotations)) == (1, record.step_count)


# Texts

TEXT = "w17 w4 w99 w4 w30"
IDS = [17, 4, 99, 4, 30]
CHAT = "{{ bos_token }} {% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture
def engine(llamas, tmp_path: Path) -> InferenceEngine:
    """A Llama with a tokenizer that puts <s> (0) before each text, and with a chat template that does so too."""
    directory = hf_tokenizers.words(shutil.copytree(llamas("mha")[1], tmp_path / "hf"), 101)
    (directory / "chat_template.jinja").write_text(CHAT)
    loaded = import_model(directory)
    return build_engine(loaded.model, loaded.config, loaded.tokenizer, CHUNKED, dtype=loaded.dtype)


def test_text_begins_as_its_tokenizer_begins_it(engine: InferenceEngine, llamas) -> None:
    """Transformers' pipeline from text to text: the model reads <s> first, once, and its answer depends on it."""
    record = engine.generate([TEXT], RequestParams(num_tokens_to_generate=GENERATED, ignore_eos=True))[0]
    expected = oracle.their_greedy(llamas("mha")[0], [0, *IDS], GENERATED)
    assert list(record.prompt_tokens) == [0, *IDS]
    assert list(record.generated_tokens) == expected
    assert record.generated_text == " ".join(f"w{token}" for token in expected if token > 1)
    assert expected != oracle.their_greedy(llamas("mha")[0], IDS, GENERATED)


def test_one_beginning_and_no_more(engine: InferenceEngine) -> None:
    """One beginning token is added to text, to chat templates, and on request; ids are left alone."""
    chat = engine.controller.tokenizer.apply_chat_template([{"role": "user", "content": TEXT}])
    assert chat.startswith("<s>")
    asked = SamplingParams(num_tokens_to_generate=1, temperature=0.0)
    asked.add_attributes({"add_BOS": True})
    for prompt in (TEXT, f"<s>{TEXT}", f"<s><s> {TEXT}", chat):
        for params in (None, asked):
            assert list(engine.generate([prompt], params)[0].prompt_tokens) == [0, *IDS], prompt
        (offline,) = tokenize_prompts([Prompt(prompt, RequestParams(), "here")], engine.controller.tokenizer, 101)
        assert list(offline.prompt_tokens) == [0, *IDS], prompt
    for ids in (IDS, [0, 0, *IDS]):
        assert list(engine.generate([ids])[0].prompt_tokens) == ids


def test_tokenizers_that_begin_nothing(engine: InferenceEngine) -> None:
    """A beginning is not added unasked, and a missing one cannot be requested."""

    class Plain:
        bos, eod, vocab_size = 0, 1, 101

        def tokenize(self, text: str) -> list[int]:
            return list(IDS)

    controller = engine.controller
    controller.tokenizer = Plain()
    assert controller.prompt_tokens(TEXT) == IDS
    assert controller.prompt_tokens(TEXT, add_bos=True) == [0, *IDS]
    controller.tokenizer.bos = None
    assert controller.prompt_tokens(TEXT) == IDS
    with pytest.raises(ConfigError, match="add_BOS is set, but the tokenizer has no beginning-of-document token"):
        controller.prompt_tokens(TEXT, add_bos=True)
