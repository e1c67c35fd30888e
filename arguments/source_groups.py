"""Flags of the model's and the tokenizer's source."""

from __future__ import annotations

from arguments.flags import Flag, FlagGroup
from megatron_ext.config import SourceConfig, TokenizerConfig
from megatron_ext.config.layers.pattern import MODEL_PROVIDERS
from megatron_ext.config.source import GENERATION_CONFIGS, TRANSFORMER_IMPLEMENTATIONS
from megatron_ext.config.tokenizer import TIKTOKEN_PATTERNS, TOKENIZER_TYPES

SOURCE = FlagGroup(
    "weights",
    SourceConfig,
    (
        Flag(
            "load", "Checkpoint to load; default: the embedded model, or --load-hf, or the model flags", metavar="DIR"
        ),
        Flag("load_hf", "Hugging Face checkpoint to load: config.json and safetensors", metavar="DIR"),
        Flag("save", "Where to save the model before it runs", metavar="DIR"),
        Flag("model_config", "YAML file of flags; a flag on the command line decides over it", metavar="FILE.yaml"),
        Flag("use_checkpoint_args", "What the checkpoint says of the model decides over flags, and is logged"),
        Flag(
            "model_provider", "Kind of model that the checkpoint, or --num-layers, must be of", choices=MODEL_PROVIDERS
        ),
        Flag("padded_vocab_size", "Rows of the embedding; default: the checkpoint's, else --vocab-size"),
        Flag(
            "generation_config",
            "Take the sampling defaults of the model's generation_config.json, for what flags and requests do not say",
            choices=GENERATION_CONFIGS,
        ),
        Flag(
            "transformer_impl",
            "Whose linear layers and norms: Transformer Engine's where it is installed, on CUDA; "
            "inference_optimized is local",
            choices=TRANSFORMER_IMPLEMENTATIONS,
        ),
        Flag("bf16", "Parameters in bfloat16"),
        Flag("fp16", "Parameters in float16"),
        Flag("seed", "Seed of random weights and of each request's random generator"),
    ),
)

TOKENIZER = FlagGroup(
    "tokenizer",
    TokenizerConfig,
    (
        Flag(
            "tokenizer_type",
            "Kind of tokenizer; default: what the checkpoint has. NullTokenizer: texts are token ids with spaces",
            choices=TOKENIZER_TYPES,
        ),
        Flag(
            "tokenizer_model",
            "Tokenizer's directory or file, or its name on the Hugging Face hub; default: the checkpoint's",
            metavar="PATH",
        ),
        Flag("vocab_file", "Of a GPT2BPETokenizer: vocab.json", metavar="FILE"),
        Flag("merge_file", "Of a GPT2BPETokenizer: merges.txt", metavar="FILE"),
        Flag("tiktoken_pattern", "Of a TikTokenizer: how texts are cut; default: v2", choices=TIKTOKEN_PATTERNS),
        Flag("tiktoken_num_special_tokens", "Of a TikTokenizer: ids before those of the file; default: 1000"),
        Flag(
            "use_tokenizer_model_from_checkpoint_args",
            "Where no tokenizer is beside the checkpoint: take the one that its arguments name, if it is there",
        ),
    ),
)
