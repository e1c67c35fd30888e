"""How texts begin for an imported model: once, with the token that its tokenizer puts there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.config import BatchingConfig, RequestParams, SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import load_model
from megatron_ext.offline.prompts import Prompt, tokenize_prompts
from megatron_ext.text.tokenizer import tokenize_prompt
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.support import hf_tokenizers

TEXT = "w17 w4 w99 w4 w30"
IDS = [17, 4, 99, 4, 30]
CHAT = "{{ bos_token }} {% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture
def engine(oracles, tmp_path: Path) -> InferenceEngine:
    """A Llama with a tokenizer that puts <s> (0) before each text, and with a chat template that does so too."""
    directory = hf_tokenizers.words(shutil.copytree(oracles("llama")[1], tmp_path / "hf"), 101)
    (directory / "chat_template.jinja").write_text(CHAT)
    loaded = load_model(SourceConfig(load_hf=str(directory)), {}, device=oracle.CPU)
    batching = BatchingConfig(block_size=16, block_count=80, max_requests=8, max_tokens=48)
    return build_engine(loaded.model, loaded.config, loaded.tokenizer, batching, dtype=loaded.dtype)


def test_text_begins_as_its_tokenizer_begins_it(engine: InferenceEngine, oracles) -> None:
    """Transformers' pipeline from text to text: the model reads <s> first, once, and its answer depends on it."""
    record = engine.generate([TEXT], RequestParams(num_tokens_to_generate=10, ignore_eos=True))[0]
    theirs, found = oracles("llama")[0], list(record.generated_tokens)
    assert list(record.prompt_tokens) == [0, *IDS]
    assert oracle.their_logits(theirs, [0, *IDS, *found])[len(IDS) : -1].argmax(-1).tolist() == found
    assert oracle.their_logits(theirs, [*IDS, *found])[len(IDS) - 1 : -1].argmax(-1).tolist() != found
    assert record.generated_text == " ".join(f"w{token}" for token in found if token > 1)


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


def test_tokenizers_that_begin_nothing() -> None:
    """A beginning is not added unasked, and a missing one cannot be requested."""

    class Plain:
        bos, eod, vocab_size = 0, 1, 101

        def tokenize(self, text: str) -> list[int]:
            return list(IDS)

    tokenizer = Plain()
    assert tokenize_prompt(tokenizer, TEXT) == IDS
    assert tokenize_prompt(tokenizer, TEXT, add_bos=True) == [0, *IDS]
    tokenizer.bos = None
    assert tokenize_prompt(tokenizer, TEXT) == IDS
    with pytest.raises(ConfigError, match="add_BOS is set, but the tokenizer has no beginning-of-document token"):
        tokenize_prompt(tokenizer, TEXT, add_bos=True)
