"""Source of a model: its weights, its tokenizer, and how they are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from megatron_ext.config.layers import MODEL_PROVIDERS, parse_layer_freq
from megatron_ext.config.options import flag_of, option, require, require_options

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

    tokenizer_type: str | None = option(
        None,
        "Kind of tokenizer; default: the checkpoint's. NullTokenizer: texts are token ids separated by spaces",
        choices=TOKENIZER_TYPES,
    )
    tokenizer_model: str | None = option(
        None,
        "Tokenizer's directory or file, or its name on the Hugging Face hub; default: the checkpoint's",
        metavar="PATH",
    )
    vocab_file: str | None = option(None, "vocab.json of a GPT2BPETokenizer", metavar="FILE")
    merge_file: str | None = option(None, "merges.txt of a GPT2BPETokenizer", metavar="FILE")
    tiktoken_pattern: str | None = option(
        None, "Pattern by which a TikTokenizer splits texts; default: v2", choices=TIKTOKEN_PATTERNS
    )
    tiktoken_num_special_tokens: int | None = option(
        None, "Number of ids of a TikTokenizer before its file's ids; default: 1000", minimum=1
    )
    use_tokenizer_model_from_checkpoint_args: bool = option(
        True, "Without a tokenizer beside the checkpoint, use the tokenizer that its arguments name, if it exists"
    )
    chat_template: str | None = option(
        None, "Jinja file of the chat template; default: the tokenizer's", metavar="FILE"
    )

    def __post_init__(self) -> None:
        require_options(self)
        kind = self.tokenizer_type
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

    load: str | None = option(
        None, "Checkpoint to load; default: --load-hf, else the model flags, else the embedded model", metavar="DIR"
    )
    load_hf: str | None = option(None, "Hugging Face checkpoint to load: config.json and safetensors", metavar="DIR")
    hf_overrides: HfOverrides | None = option(
        None,
        'Changes of the fields of its config.json, as in {"rope_theta": 1000000, "sliding_window": null}',
        metavar="JSON",
    )
    save: str | None = option(None, "Directory to save the model to before it runs", metavar="DIR")
    model_config: str | None = option(
        None, "YAML file of flags; flags on the command line override it", metavar="FILE.yaml"
    )
    use_checkpoint_args: bool = option(False, "Let the checkpoint override model flags, and log the differences")
    override_checkpoint_args: tuple[str, ...] = option(
        (),
        "Flags of the model that may differ from the checkpoint's arguments, as in rotary-base norm-epsilon",
        metavar="NAME",
    )
    typed: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # fields of the model, and flags as typed
    model_provider: str | None = option(
        None, "Kind of model; the checkpoint or --num-layers must fit it", choices=MODEL_PROVIDERS
    )
    moe_layer_freq: str | None = option(
        None, "Layers of a GPT that have experts: every Nth from the first, or a list as in ([0]*1+[1]*3); default: all"
    )
    window_attn_skip_freq: str | None = option(
        None, "Layers of a GPT without a window: every Nth, or those with 0 in a list; default: none"
    )
    padded_vocab_size: int | None = option(
        None, "Rows of the embedding; default: the checkpoint's, else --vocab-size", minimum=1
    )
    generation_config: str | None = option(
        None,
        "auto, the server's default: options that neither flags nor requests set are taken from the model's "
        "generation_config.json; none, the default elsewhere: they are not",
        choices=GENERATION_CONFIGS,
    )
    transformer_impl: str = option(
        LOCAL,
        "Implementation of linear layers and norms: Transformer Engine if it is installed, on CUDA; "
        "inference_optimized means local",
        choices=TRANSFORMER_IMPLEMENTATIONS,
    )
    dtype: str = option(
        AUTO_TYPE, "Type of the parameters; auto: bfloat16 on CUDA, float32 elsewhere", choices=PARAMETER_TYPES
    )
    bf16: bool = option(False, "Use bfloat16 parameters")
    fp16: bool = option(False, "Use float16 parameters")
    seed: int = option(
        1234, "Seed of random weights and of each request's random generator", minimum=0, maximum=2**63 - 1
    )
    inference_sampling_seed: int | None = option(
        None, "Seed of each request's random generator; default: --seed", minimum=0, maximum=2**63 - 1
    )

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
        require(
            self.dtype in (AUTO_TYPE, self.parameter_type),
            f"--dtype {self.dtype} and --{'bf16' if self.bf16 else 'fp16'} contradict each other; give one of them",
        )
        require(
            bool(self.load or self.load_hf) or not self.use_checkpoint_args,
            "--use-checkpoint-args needs a checkpoint; give --load or --load-hf",
        )
        if self.moe_layer_freq is not None:
            parse_layer_freq(self.moe_layer_freq)
        if self.window_attn_skip_freq is not None:
            parse_layer_freq(self.window_attn_skip_freq, "--window-attn-skip-freq")

    @property
    def sampling_seed(self) -> int:
        """Seed of the requests' random generators."""
        return self.seed if self.inference_sampling_seed is None else self.inference_sampling_seed

    @property
    def parameter_type(self) -> str:
        """Type of the parameters, one of PARAMETER_TYPES, by `dtype` or Megatron's flags."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else self.dtype
