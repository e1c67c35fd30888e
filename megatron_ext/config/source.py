"""Source of a model: its weights, its tokenizer, and how they are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.config.checks import require
from megatron_ext.config.hf_overrides import HfOverrides
from megatron_ext.config.layers.layer_freq import parse_layer_freq
from megatron_ext.config.layers.pattern import MODEL_PROVIDERS
from megatron_ext.config.tokenizer import TokenizerConfig

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
