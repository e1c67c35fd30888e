"""Choice of a model's tokenizer: the requested one, the one in its directory, or the one it was trained with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from megatron_ext.config import SourceConfig
from megatron_ext.config.model_folder import HUB_NAME
from megatron_ext.config.source import (
    GPT2_TOKENIZER,
    HUGGING_FACE_TOKENIZER,
    NULL_TOKENIZER,
    SENTENCEPIECE_TOKENIZERS,
    TIKTOKEN_TOKENIZER,
)
from megatron_ext.errors import ConfigError
from megatron_ext.models.megatron.kept_tokenizers import has_kept_tokenizer, read_kept_tokenizer
from megatron_ext.models.megatron.training_args import TrainingFacts
from megatron_ext.parallel.world import is_first_rank
from megatron_ext.text.library_tokenizers import (
    DEFAULT_PATTERN,
    DEFAULT_SPECIAL_TOKENS,
    TIKTOKEN_IDS,
    Gpt2Tokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
)
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer, Tokenizer
from megatron_ext.text.tokenizer_files import TOKENIZER_FILES, has_tokenizer, no_tokenizer

logger = logging.getLogger(__name__)

# Kinds whose files cannot be told apart from a tokenizer.json by name.
_FILE_KINDS = (TIKTOKEN_TOKENIZER, *SENTENCEPIECE_TOKENIZERS)
_NOTHING = TrainingFacts(is_gpt=False, vocabulary_rows=0)


class VocabularySizes(NamedTuple):
    """Numbers of token ids: the value of `--vocab-size`, and the model's, None if the tokenizer determines them."""

    asked: int | None
    model: int | None


def choose_tokenizer(
    source: SourceConfig, directory: Path | None, ids: VocabularySizes, trained: TrainingFacts | None = None
) -> Tokenizer:
    """Return the tokenizer of a model.

    Args:
        directory: The model's directory, with or without a tokenizer.

    Raises:
        ConfigError: The tokenizer cannot be loaded, or the request contradicts itself.
    """
    tokenizer = _chosen(source, directory, ids, trained)
    if source.chat_template is not None and not isinstance(tokenizer, TextTokenizer):
        found = "has none" if getattr(tokenizer, "problem", "") else f"has a {type(tokenizer).__name__}"
        raise ConfigError(
            f"--chat-template {source.chat_template} needs a tokenizer of Hugging Face, the model {found}; "
            "give --tokenizer-model, or leave it out"
        )
    return tokenizer


def _chosen(
    source: SourceConfig, directory: Path | None, ids: VocabularySizes, trained: TrainingFacts | None
) -> Tokenizer:
    kind = source.tokenizer_type
    if kind == NULL_TOKENIZER:
        if source.tokenizer_model is not None:
            raise ConfigError(
                f"--tokenizer-type {kind} contradicts --tokenizer-model {source.tokenizer_model}; give one of them"
            )
        return NullTokenizer(_size(ids))
    if kind is None:
        kind = _kind_of_file(source, trained)
    if kind is None and source.tokenizer_model is None and directory is not None and has_kept_tokenizer(directory):
        return read_kept_tokenizer(directory)
    if kind in (None, HUGGING_FACE_TOKENIZER):
        chosen = _hugging_face(source, directory)
        if chosen is not None:
            return chosen
        if kind is not None:
            raise ConfigError(
                f"--tokenizer-type {kind} needs tokenizer files, {directory} has none; give --tokenizer-model"
            )
        if source.load_hf is not None and directory is not None:
            return _missing(directory, ids)
        if directory is not None and trained is None:
            ids_as_texts = "texts are token ids separated by spaces, unless --tokenizer-model is given"
            _say(f"{no_tokenizer(directory)}; {ids_as_texts}", logging.INFO)
        return _as_trained(source, ids, trained) or NullTokenizer(_size(ids))
    assert kind is not None
    return _of_kind(kind, source, ids, trained)


def _size(ids: VocabularySizes) -> int:
    size = ids.asked or ids.model
    if size is None:
        raise ConfigError(f"--tokenizer-type {NULL_TOKENIZER} needs --vocab-size")
    return size


def _missing(directory: Path, ids: VocabularySizes) -> Tokenizer:
    """Return the tokenizer of a published folder that has none, and say so."""
    problem = (
        f"{no_tokenizer(directory)}; copy them from where the model was published, or give --tokenizer-model; "
        "prompts of token ids need none"
    )
    _say(problem, logging.WARNING)
    return NullTokenizer(_size(ids), problem)


def _kind_of_file(source: SourceConfig, trained: TrainingFacts | None) -> str | None:
    """Return the implied kind if none is given: from flags of one kind, or from the model's training."""
    if source.vocab_file or source.merge_file:
        return GPT2_TOKENIZER
    if source.tokenizer_model is None or not Path(source.tokenizer_model).is_file():
        return None
    kind = trained.tokenizer_type if trained else None
    return kind if kind in _FILE_KINDS else None


def _hugging_face(source: SourceConfig, directory: Path | None) -> Tokenizer | None:
    if source.tokenizer_model is not None:
        directory = _local(source.tokenizer_model)
    elif directory is None or not has_tokenizer(directory):
        return None
    return TextTokenizer(directory, source.chat_template)


def _as_trained(source: SourceConfig, ids: VocabularySizes, trained: TrainingFacts | None) -> Tokenizer | None:
    """Return the tokenizer that the checkpoint's arguments name, if it is on this machine."""
    if trained is None or not source.use_tokenizer_model_from_checkpoint_args:
        return None
    kind, files = trained.tokenizer_type, [trained.tokenizer_model, trained.vocab_file, trained.merge_file]
    named = [file for file in files if file is not None]
    if kind is None or kind == NULL_TOKENIZER or not named:
        return None
    where = ", ".join(map(str, named))
    if not all(file.exists() for file in named):
        _say(
            f"the checkpoint was trained with the {kind} {where}, which is not on this machine: texts are shown as "
            f"token ids; give --tokenizer-model",
            logging.WARNING,
        )
        return None
    _say(f"tokenizer of the checkpoint's arguments: {kind} {where}", logging.INFO)
    if kind == HUGGING_FACE_TOKENIZER:
        assert trained.tokenizer_model is not None
        return TextTokenizer(trained.tokenizer_model, source.chat_template)
    return _of_kind(kind, source, ids, trained)


def _say(line: str, level: int) -> None:
    if is_first_rank():
        logger.log(level, "%s", line)


def _of_kind(kind: str, source: SourceConfig, ids: VocabularySizes, trained: TrainingFacts | None) -> Tokenizer:
    """Return a tokenizer of one of Megatron's own kinds; the checkpoint's arguments replace absent flags."""
    if trained is None or trained.tokenizer_type != kind or not source.use_tokenizer_model_from_checkpoint_args:
        trained = _NOTHING
    if kind == GPT2_TOKENIZER:
        return Gpt2Tokenizer(*_gpt2_files(source, trained))
    model = Path(source.tokenizer_model) if source.tokenizer_model else trained.tokenizer_model
    if model is None:
        raise ConfigError(f"--tokenizer-type {kind} needs --tokenizer-model FILE")
    if not model.exists():
        raise ConfigError(f"tokenizer {model} does not exist; give a file of a {kind}")
    if kind != TIKTOKEN_TOKENIZER:
        return SentencePieceTokenizer(model)
    return TikTokenizer(
        model,
        source.tiktoken_pattern or trained.tiktoken_pattern or DEFAULT_PATTERN,
        source.tiktoken_num_special_tokens or trained.tiktoken_num_special_tokens or DEFAULT_SPECIAL_TOKENS,
        ids.asked or TIKTOKEN_IDS,
    )


def _gpt2_files(source: SourceConfig, trained: TrainingFacts) -> tuple[Path, Path]:
    vocab, merges = source.vocab_file or trained.vocab_file, source.merge_file or trained.merge_file
    if vocab is None or merges is None:
        raise ConfigError(f"--tokenizer-type {GPT2_TOKENIZER} needs --vocab-file and --merge-file; give both")
    for file in (Path(vocab), Path(merges)):
        if not file.exists():
            raise ConfigError(f"tokenizer {file} does not exist; give --vocab-file and --merge-file")
    return Path(vocab), Path(merges)


def _local(name: str) -> Path:
    """Return a tokenizer's path; a missing path that looks like a Hugging Face hub name is fetched or cached."""
    path = Path(name)
    if path.exists() or not HUB_NAME.fullmatch(name):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(TOKENIZER_FILES)))
    except (OSError, ValueError) as error:  # the hub's own errors are of these kinds
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"tokenizer {name} does not exist here, and cannot be fetched from the Hugging Face hub: {reason}"
        ) from error
