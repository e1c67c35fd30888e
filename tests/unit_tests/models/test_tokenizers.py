"""MF-4: tokenizer of a model: the requested one, the one beside the weights, or the one of its training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_ext.config import SourceConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.errors import ConfigError
from megatron_ext.models import load
from megatron_ext.models.megatron.training_args import TrainingFacts
from megatron_ext.models.tokenizers import VocabularySizes, choose_tokenizer
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import Message, dicts_of
from megatron_ext.text.library_tokenizers import Gpt2Tokenizer, SentencePieceTokenizer, TikTokenizer
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer
from tests.unit_tests.support.vocabularies import write_gpt2, write_sentencepiece, write_tiktoken

ANY = VocabularySizes(None, 2000)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    write_tiktoken(folder / "tik.vocab.json")
    write_sentencepiece(folder / "llama.model")
    write_gpt2(folder)
    (folder / "empty").mkdir()
    return folder


def source(files: Path, flags: str) -> SourceConfig:
    """Source with the given `field=value` pairs; a value with a dot is a file of the fixture's."""
    fields: dict = {}
    for pair in flags.split():
        name, _, value = pair.partition("=")
        fields[name] = str(files / value) if "." in value else int(value) if value.isdigit() else value
    return SourceConfig(**fields)


def trained(files: Path, kind: str, **names: str | int) -> TrainingFacts:
    more = {name: files / value if isinstance(value, str) and "." in value else value for name, value in names.items()}
    return TrainingFacts(is_gpt=True, vocabulary_rows=2000, tokenizer_type=kind, **more)


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("tokenizer_type=TikTokenizer tokenizer_model=tik.vocab.json", TikTokenizer),
        ("tokenizer_type=Llama2Tokenizer tokenizer_model=llama.model", SentencePieceTokenizer),
        ("tokenizer_type=SentencePieceTokenizer tokenizer_model=llama.model", SentencePieceTokenizer),
        ("tokenizer_type=GPTSentencePieceTokenizer tokenizer_model=llama.model", SentencePieceTokenizer),
        ("tokenizer_type=GPT2BPETokenizer vocab_file=vocab.json merge_file=merges.txt", Gpt2Tokenizer),
        ("vocab_file=vocab.json merge_file=merges.txt", Gpt2Tokenizer),
        ("tokenizer_type=NullTokenizer", NullTokenizer),
        ("", NullTokenizer),
    ],
)
def test_asked_for(files, flags, kind):
    assert type(choose_tokenizer(source(files, flags), files / "empty", ANY)) is kind


KEPT = {
    "tokenizer_type=TikTokenizer tokenizer_model=tik.vocab.json tiktoken_num_special_tokens=8 tiktoken_pattern=v1": (
        TikTokenizer
    ),
    "tokenizer_type=Llama2Tokenizer tokenizer_model=llama.model": SentencePieceTokenizer,
    "vocab_file=vocab.json merge_file=merges.txt": Gpt2Tokenizer,
}
TEXT = "The quick brown the é 日本"


@pytest.mark.parametrize("flags", KEPT)
def test_files_are_saved_with_a_model(files, flags, tiny_model, tiny_config, tmp_path, monkeypatch):
    """MF-4: loaded without a flag, the ids are the same, wherever the files were; saved over it, too."""
    kind = KEPT[flags]
    tokenizer = choose_tokenizer(source(files, flags), files / "empty", VocabularySizes(269, 2000))
    target = tmp_path / "saved"
    for _ in range(2):
        load.save_model(target, load.LoadedModel(tiny_model, tiny_config, tokenizer, torch.float32, "x"))
    again = load.load_model(SourceConfig(load=str(target)), {}, device=torch.device("cpu")).tokenizer
    assert type(again) is kind
    assert again.files != tokenizer.files
    assert (again.vocab_size, again.eod, again.bos) == (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos)
    assert again.tokenize(TEXT) == tokenizer.tokenize(TEXT)
    assert again.detokenize(again.tokenize(TEXT)) == tokenizer.detokenize(tokenizer.tokenize(TEXT))
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == tokenizer.eod
    other = source(files, "tokenizer_type=NullTokenizer")
    assert type(choose_tokenizer(other, target, ANY)) is NullTokenizer, "flags decide"
    embedded = SourceConfig(tokenizer_model=str(EMBEDDED_MODEL_DIR))
    assert type(choose_tokenizer(embedded, target, ANY)) is TextTokenizer


SPOILED = {
    "has tokenizer_type = 'BertTokenizer', which must be one of TikTokenizer, ": {"tokenizer_type": "BertTokenizer"},
    "has tokenizer_type = None": {"tokenizer_type": None},
    "has fields tokenizer_type, .*, more": {"more": 1},
    "a tiktoken_pattern, .* that is not valid: 'v3', 8, 269": {"tiktoken_pattern": "v3"},
    "that is not valid: 'v2', True, 269": {"tiktoken_num_special_tokens": True},
    "that is not valid: 'v2', 8, '269'": {"vocab_size": "269"},
}


@pytest.mark.parametrize("message", SPOILED)
def test_refuses_invalid_settings_of_a_saved_tokenizer(files, message, tmp_path):
    """SE-1: invalid settings are refused in one line."""
    fields = {"tokenizer_type": "TikTokenizer", "tiktoken_pattern": "v2", "tiktoken_num_special_tokens": 8}
    fields |= {"vocab_size": 269} | SPOILED[message]
    shutil.copyfile(files / "tik.vocab.json", tmp_path / "tiktoken.json")
    (tmp_path / "megatron_tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=message) as caught:
        choose_tokenizer(SourceConfig(), tmp_path, ANY)
    assert "\n" not in str(caught.value)


def test_that_it_is_not_saved_is_said(files, tmp_path, caplog):
    """A warning names the part that a saved model lacks: a tokenizer of the caller's own."""
    saved = []
    for tokenizer in (object(), NullTokenizer(7)):
        loaded = load.LoadedModel(None, None, tokenizer, None, "x")
        load.save_model(tmp_path / "to", loaded, lambda *args: saved.append(args[3]))
    assert saved == [None, None]
    assert [message.split(" ", 1)[1] for message in caplog.messages] == [
        "is saved without its tokenizer (object), which has no files"
    ]


def test_sizes_of_a_tiktokenizer(files):
    flags = "tokenizer_type=TikTokenizer tokenizer_model=tik.vocab.json"
    assert choose_tokenizer(source(files, flags), None, ANY).tokenize("a") == [1000 + ord("a")]
    few = source(files, f"{flags} tiktoken_num_special_tokens=8")
    assert choose_tokenizer(few, None, ANY).tokenize("a") == [8 + ord("a")]
    assert choose_tokenizer(few, None, VocabularySizes(264, 2000)).vocab_size == 264
    with pytest.raises(ConfigError, match="8 special tokens leave 42 of 50 ids to the file"):
        choose_tokenizer(few, None, VocabularySizes(50, 2000))


@pytest.mark.parametrize(
    ("kind", "names", "expected"),
    [
        ("TikTokenizer", {"tokenizer_model": "tik.vocab.json", "tiktoken_num_special_tokens": 8}, TikTokenizer),
        ("Llama2Tokenizer", {"tokenizer_model": "llama.model"}, SentencePieceTokenizer),
        ("GPT2BPETokenizer", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}, Gpt2Tokenizer),
        ("NullTokenizer", {}, NullTokenizer),
        ("Llama2Tokenizer", {"tokenizer_model": "gone.model"}, NullTokenizer),
    ],
)
def test_as_it_was_trained(files, kind, names, expected, caplog):
    """The training tokenizer is used if none is requested and none lies beside the weights, unless switched off."""
    facts = trained(files, kind, **names)
    chosen = choose_tokenizer(SourceConfig(), files / "empty", ANY, facts)
    assert type(chosen) is expected
    if expected is TikTokenizer:
        assert chosen.tokenize("a") == [8 + ord("a")]
    off = SourceConfig(use_tokenizer_model_from_checkpoint_args=False)
    assert type(choose_tokenizer(off, files / "empty", ANY, facts)) is NullTokenizer
    beside = choose_tokenizer(SourceConfig(), EMBEDDED_MODEL_DIR, ANY, facts)
    assert type(beside) is TextTokenizer
    lines = [line for line in caplog.messages if "was trained with the Llama2Tokenizer" in line]
    assert [line.endswith("texts are shown as token ids; give --tokenizer-model") for line in lines] == [True] * (
        names == {"tokenizer_model": "gone.model"}
    )


def test_a_file_is_of_the_kind_that_the_model_was_trained_with(files):
    facts = trained(files, "TikTokenizer", tiktoken_num_special_tokens=8)
    chosen = choose_tokenizer(source(files, "tokenizer_model=tik.vocab.json"), None, ANY, facts)
    assert chosen.tokenize("a") == [8 + ord("a")]
    embedded = SourceConfig(tokenizer_model=str(EMBEDDED_MODEL_DIR))
    assert type(choose_tokenizer(embedded, None, ANY, facts)) is TextTokenizer


def test_a_published_folder_without_a_tokenizer(files, caplog):
    """U2: the start and each text say which files were looked for; token ids need no tokenizer."""
    found = choose_tokenizer(SourceConfig(load_hf=str(files / "empty")), files / "empty", ANY)
    problem = (
        f"{files}/empty has no tokenizer: none of tokenizer.json, tokenizer.model, vocab.json, vocab.txt; copy them "
        "from where the model was published, or give --tokenizer-model; prompts of token ids need none"
    )
    assert caplog.messages == [problem]
    for text in ("The quick", "17 4 4"):
        with pytest.raises(ConfigError) as caught:
            found.tokenize(text)
        assert str(caught.value) == problem
    chat = ChatFormat(found)
    with pytest.raises(ConfigError) as caught:
        chat.render_dicts(dicts_of([Message(role="user", content="1")]))
    assert str(caught.value) == problem
    assert (found.vocab_size, found.detokenize([17, 4])) == (2000, "17 4")
    caplog.clear()
    asked = SourceConfig(load_hf=str(files / "empty"), tokenizer_type="NullTokenizer")
    assert choose_tokenizer(asked, files / "empty", ANY).tokenize("17 4 4") == [17, 4, 4]
    assert not caplog.messages
    caplog.set_level("INFO")
    megatrons = choose_tokenizer(SourceConfig(load=str(files / "empty")), files / "empty", ANY)  # often trained so
    assert megatrons.tokenize("17 4") == [17, 4]
    assert caplog.messages[0].endswith("texts are token ids separated by spaces, unless --tokenizer-model is given")


def test_a_chat_template_of_a_flag(files, tmp_path):
    file = tmp_path / "given.jinja"
    file.write_text("given")
    found = choose_tokenizer(SourceConfig(chat_template=str(file)), EMBEDDED_MODEL_DIR, ANY)
    assert found.apply_chat_template([{"role": "user", "content": "1"}]) == "given"
    facts = TrainingFacts(True, 2000, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=EMBEDDED_MODEL_DIR)
    assert choose_tokenizer(SourceConfig(chat_template=str(file)), files / "empty", ANY, facts).chat_template == "given"
    for flags in ({"tokenizer_type": "NullTokenizer"}, {"tokenizer_type": "Llama2Tokenizer"}):
        with pytest.raises(ConfigError, match=r"--chat-template .* is for --tokenizer-type HuggingFaceTokenizer, not"):
            SourceConfig(chat_template=str(file), **flags)
    for flags, named in (({}, "a NullTokenizer"), ({"load_hf": str(files / "empty")}, "none")):
        with pytest.raises(ConfigError, match=f"needs a tokenizer of Hugging Face, the model has {named}; give"):
            choose_tokenizer(SourceConfig(chat_template=str(file), **flags), files / "empty", ANY)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("tokenizer_type=SentencePiece", "'SentencePiece' is unknown; one of HuggingFaceTokenizer, Null"),
        ("tokenizer_type=TikTokenizer", "--tokenizer-type TikTokenizer needs --tokenizer-model FILE"),
        ("tokenizer_type=TikTokenizer tokenizer_model=no.json", r"no\.json does not exist; give a file of a TikTok"),
        ("tokenizer_type=GPT2BPETokenizer vocab_file=vocab.json", "needs --vocab-file and --merge-file; give both"),
        ("vocab_file=no.json merge_file=merges.txt", r"no\.json does not exist"),
        ("tokenizer_type=HuggingFaceTokenizer", "needs tokenizer files"),
        ("tokenizer_type=NullTokenizer tokenizer_model=tik.vocab.json", "contradicts --tokenizer-model"),
    ],
)
def test_cannot_be_had(files, flags, message):
    with pytest.raises(ConfigError, match=message):
        choose_tokenizer(source(files, flags), files / "empty", ANY)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> None:
    """The hub's cache with one tokenizer in it, as huggingface_hub lays it out; there is no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(EMBEDDED_MODEL_DIR / name, snapshot)


@pytest.mark.usefixtures("hub")
def test_names_on_the_hub():
    """A name is looked up; other texts are paths."""
    chosen = choose_tokenizer(SourceConfig(tokenizer_model="some/model"), None, ANY)
    assert isinstance(chosen, TextTokenizer)
    assert chosen.tokenize("Hello") == TextTokenizer(EMBEDDED_MODEL_DIR).tokenize("Hello")
    refused = dict.fromkeys(("nowhere", "./no/where", "/no/where", "a/b/c"), "does not exist; give a directory")
    for name, message in {"some/other": "does not exist here, and cannot be fetched", **refused}.items():
        with pytest.raises(ConfigError, match=message) as caught:
            choose_tokenizer(SourceConfig(tokenizer_model=name), None, ANY)
        assert "\n" not in str(caught.value)
