"""Training facts: settings in a checkpoint of Megatron-LM outside the model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.tokenizer import TOKENIZER_TYPES


@dataclass(frozen=True)
class TrainingFacts:
    """Facts of a model that Megatron-LM trained.

    Attributes:
        is_gpt: Whether the stored weights are a GPT's: each layer an attention and an MLP or experts.
        vocabulary_rows: Rows of the embedding, padding included.
        tokenizer_type: Tokenizer type of the run; None if absent or unknown here.
        tokenizer_model: Tokenizer file of the run, on any machine.
        vocab_file: Vocabulary file of the run.
        merge_file: Merges file of the run.
        tiktoken_pattern: Pattern of the run's tiktoken tokenizer.
        tiktoken_num_special_tokens: Special tokens of the run's tiktoken tokenizer.
    """

    is_gpt: bool
    vocabulary_rows: int
    tokenizer_type: str | None = None
    tokenizer_model: Path | None = None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None


def training_facts(args: object, *, is_gpt: bool, vocabulary_rows: int) -> TrainingFacts:
    """Extract the facts from the arguments in a checkpoint; values of a wrong type are ignored."""

    def text(name: str) -> str | None:
        value = getattr(args, name, None)
        return value if isinstance(value, str) and value and "\0" not in value else None

    def path(name: str) -> Path | None:
        value = text(name)
        return None if value is None else Path(value)

    kind, specials = text("tokenizer_type"), getattr(args, "tiktoken_num_special_tokens", None)
    return TrainingFacts(
        is_gpt,
        vocabulary_rows,
        tokenizer_type=kind if kind in TOKENIZER_TYPES else None,
        tokenizer_model=path("tokenizer_model"),
        vocab_file=path("vocab_file"),
        merge_file=path("merge_file"),
        tiktoken_pattern=text("tiktoken_pattern"),
        tiktoken_num_special_tokens=specials if type(specials) is int else None,
    )
