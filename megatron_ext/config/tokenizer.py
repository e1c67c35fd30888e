"""Tokenizer settings."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import flag_of, require

NULL_TOKENIZER = "NullTokenizer"
HUGGING_FACE_TOKENIZER = "HuggingFaceTokenizer"
TIKTOKEN_TOKENIZER = "TikTokenizer"
GPT2_TOKENIZER = "GPT2BPETokenizer"
SENTENCEPIECE_TOKENIZERS = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TOKENIZER_TYPES = (
    HUGGING_FACE_TOKENIZER,
    NULL_TOKENIZER,
    TIKTOKEN_TOKENIZER,
    *SENTENCEPIECE_TOKENIZERS,
    GPT2_TOKENIZER,
)
TIKTOKEN_PATTERNS = ("v1", "v2")
# Flags that apply to one kind of tokenizer, by kind.
_OF_KIND = {
    TIKTOKEN_TOKENIZER: ("tiktoken_pattern", "tiktoken_num_special_tokens"),
    GPT2_TOKENIZER: ("vocab_file", "merge_file"),
    HUGGING_FACE_TOKENIZER: ("chat_template",),
}


@dataclass(frozen=True)
class TokenizerConfig:
    """Kind of tokenizer, its files, and settings that the files do not contain."""

    tokenizer_type: str | None = None  # one of TOKENIZER_TYPES; default: the checkpoint's
    tokenizer_model: str | None = None  # a directory, a file, or a name on the Hugging Face hub
    vocab_file: str | None = None  # for GPT2BPETokenizer
    merge_file: str | None = None  # the same
    tiktoken_pattern: str | None = None  # for TikTokenizer; default: v2
    tiktoken_num_special_tokens: int | None = None  # the same; default: 1000
    use_tokenizer_model_from_checkpoint_args: bool = True
    chat_template: str | None = None  # file of the chat template; default: the tokenizer's

    def __post_init__(self) -> None:
        kind = self.tokenizer_type
        require(
            kind is None or kind in TOKENIZER_TYPES,
            f"--tokenizer-type {kind} is unknown; one of {', '.join(TOKENIZER_TYPES)}",
        )
        pattern, specials = self.tiktoken_pattern, self.tiktoken_num_special_tokens
        require(
            pattern is None or pattern in TIKTOKEN_PATTERNS,
            f"--tiktoken-pattern {pattern!r} is unknown; one of {', '.join(TIKTOKEN_PATTERNS)}",
        )
        require(specials is None or specials > 0, f"--tiktoken-num-special-tokens {specials} must be positive")
        for owner, names in _OF_KIND.items():
            for name in names:
                given = getattr(self, name)
                require(
                    given is None or kind in (None, owner),
                    f"{flag_of(name)} {given} is for --tokenizer-type {owner}, not {kind}; leave it out",
                )
