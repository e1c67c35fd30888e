"""Source of a model: its weights, its tokenizer, and how they are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from megatron_ext.config.layers import MODEL_PROVIDERS, parse_layer_freq
from megatron_ext.config.options import flag_of, require

_NESTED = "_config"  # ending of the names of nested configurations, such as `text_config`


class HfOverrides(str):
    """JSON object of fields and their values; a null is a null in the file, as vLLM has it."""

    expected: ClassVar[str] = 'a JSON object of fields, as in {"rope_theta": 1000000, "sliding_window": null}'

    @classmethod
    def of(cls, value: object) -> HfOverrides:
        """Convert a mapping, or the text of a JSON object.

        Raises:
            ValueError: The value has another form.
        """
        try:
            text = value if isinstance(value, str) else json.dumps(value)
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(cls.expected)
        return cls(text)

    @classmethod
    def parse(cls, text: str) -> HfOverrides:
        """Parse command-line text; otherwise as `of`."""
        return cls.of(text)

    def over(self, raw: Mapping[str, object]) -> dict[str, object]:
        """Return a decoded `config.json` with these fields; nested configurations are merged, other values replaced."""
        changed = dict(raw)
        for name, value in json.loads(self).items():
            before = changed.get(name)
            if name.endswith(_NESTED) and isinstance(before, dict) and isinstance(value, dict):
                value = {**before, **value}
            changed[name] = value
        return changed


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


AUTO_GENERATION_CONFIG, NO_GENERATION_CONFIG = "auto", "none"
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
INFERENCE_OPTIMIZED = "inference_optimized"  # Megatron's name for inference layers; the local ones serve as such
TRANSFORMER_IMPLEMENTATIONS = (LOCAL, TRANSFORMER_ENGINE, INFERENCE_OPTIMIZED)
AUTO_TYPE = "auto"
PARAMETER_TYPES = (AUTO_TYPE, "float32", "bfloat16", "float16")
GENERATION_CONFIGS = (AUTO_GENERATION_CONFIG, NO_GENERATION_CONFIG)


@dataclass(frozen=True)
class SourceConfig(TokenizerConfig):
    """Source of the weights and the tokenizer, and the type of the parameters."""

    load: str | None = None
    load_hf: str | None = None
    hf_overrides: HfOverrides | None = None  # changes of the fields of its config.json
    save: str | None = None
    model_config: str | None = None  # a YAML file of flags
    use_checkpoint_args: bool = False  # the checkpoint's values override model flags
    override_checkpoint_args: tuple[str, ...] = ()  # model flags, without dashes in front, that win over the checkpoint
    typed: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # fields of the model, and flags as typed
    model_provider: str | None = None  # one of MODEL_PROVIDERS; default: any that the checkpoint has
    moe_layer_freq: str | None = None  # which layers of a GPT have experts; see `config.layers.layer_freq`
    window_attn_skip_freq: str | None = None  # which layers of a GPT with windows have none; likewise
    padded_vocab_size: int | None = None  # rows of the embedding; default: the checkpoint's, else the vocabulary's
    # One of GENERATION_CONFIGS: source of sampling defaults; default: auto on a server, none elsewhere
    generation_config: str | None = None
    transformer_impl: str = LOCAL  # one of TRANSFORMER_IMPLEMENTATIONS, for linear layers and norms
    dtype: str = AUTO_TYPE  # one of PARAMETER_TYPES; auto: bf16 and fp16, else bfloat16 on CUDA and float32 elsewhere
    bf16: bool = False
    fp16: bool = False
    seed: int = 1234
    inference_sampling_seed: int | None = None  # default: seed

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.load and self.load_hf),
            f"--load {self.load} and --load-hf {self.load_hf} contradict each other; give one of them",
        )
        require(
            bool(self.load_hf) or self.hf_overrides is None,
            f"--hf-overrides {self.hf_overrides} needs --load-hf; the flags of the model change other checkpoints",
        )
        require(not (self.bf16 and self.fp16), "--bf16 and --fp16 contradict each other; give one of them")
        types = ", ".join(PARAMETER_TYPES)
        require(self.dtype in PARAMETER_TYPES, f"--dtype {self.dtype!r} is unknown; one of {types}")
        require(
            self.dtype in (AUTO_TYPE, self.parameter_type),
            f"--dtype {self.dtype} and --{'bf16' if self.bf16 else 'fp16'} contradict each other; give one of them",
        )
        for flag, seed in (("--seed", self.seed), ("--inference-sampling-seed", self.sampling_seed)):
            require(0 <= seed < 2**63, f"{flag} {seed} must be between 0 and {2**63 - 1}")
        require(
            bool(self.load or self.load_hf) or not self.use_checkpoint_args,
            "--use-checkpoint-args needs a checkpoint; give --load or --load-hf",
        )
        known = ", ".join(MODEL_PROVIDERS)
        require(
            self.model_provider in (None, *MODEL_PROVIDERS),
            f"--model-provider {self.model_provider!r} is unknown; one of {known}",
        )
        if self.moe_layer_freq is not None:
            parse_layer_freq(self.moe_layer_freq)
        if self.window_attn_skip_freq is not None:
            parse_layer_freq(self.window_attn_skip_freq, "--window-attn-skip-freq")
        sources = ", ".join(GENERATION_CONFIGS)
        require(
            self.generation_config in (None, *GENERATION_CONFIGS),
            f"--generation-config {self.generation_config!r} is unknown; one of {sources}",
        )
        implementations = ", ".join(TRANSFORMER_IMPLEMENTATIONS)
        require(
            self.transformer_impl in TRANSFORMER_IMPLEMENTATIONS,
            f"--transformer-impl {self.transformer_impl!r} is unknown; one of {implementations}",
        )
        rows = self.padded_vocab_size
        require(rows is None or rows > 0, f"--padded-vocab-size {rows} must be positive")

    @property
    def sampling_seed(self) -> int:
        """Seed of the requests' random generators."""
        return self.seed if self.inference_sampling_seed is None else self.inference_sampling_seed

    @property
    def parameter_type(self) -> str:
        """Type of the parameters, one of PARAMETER_TYPES, by `dtype` or Megatron's flags."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else self.dtype
