"""Flags of the model's and the tokenizer's source."""

from __future__ import annotations

from arguments.flags import Flag, FlagGroup
from megatron_ext.config import SourceConfig, TokenizerConfig
from megatron_ext.config.layers import MODEL_PROVIDERS
from megatron_ext.config.source import (
    GENERATION_CONFIGS,
    PARAMETER_TYPES,
    TIKTOKEN_PATTERNS,
    TOKENIZER_TYPES,
    TRANSFORMER_IMPLEMENTATIONS,
)

SOURCE = FlagGroup(
    "weights",
    SourceConfig,
    (
        Flag(
            "load",
            "Checkpoint to load; default: --load-hf, else the model flags, else the embedded model",
            metavar="DIR",
        ),
        Flag("load_hf", "Hugging Face checkpoint to load: config.json and safetensors", metavar="DIR"),
        Flag(
            "hf_overrides",
            'Changes of the fields of its config.json, as in {"rope_theta": 1000000, "sliding_window": null}',
            metavar="JSON",
        ),
        Flag("save", "Directory to save the model to before it runs", metavar="DIR"),
        Flag("model_config", "YAML file of flags; flags on the command line override it", metavar="FILE.yaml"),
        Flag(
            "use_checkpoint_args",
            "Let the checkpoint override model flags, and log the differences",
        ),
        Flag(
            "override_checkpoint_args",
            "Flags of the model that may differ from the checkpoint's arguments, as in rotary-base norm-epsilon",
            metavar="NAME",
        ),
        Flag("model_provider", "Kind of model; the checkpoint or --num-layers must fit it", choices=MODEL_PROVIDERS),
        Flag(
            "moe_layer_freq",
            "Layers of a GPT that have experts: every Nth from the first, or a list as in ([0]*1+[1]*3); default: all",
        ),
        Flag(
            "window_attn_skip_freq",
            "Layers of a GPT without a window: every Nth, or those with 0 in a list; default: none",
        ),
        Flag("padded_vocab_size", "Rows of the embedding; default: the checkpoint's, else --vocab-size"),
        Flag(
            "generation_config",
            "auto, the server's default: options that neither flags nor requests set are taken from the model's "
            "generation_config.json; none, the default elsewhere: they are not",
            choices=GENERATION_CONFIGS,
        ),
        Flag(
            "transformer_impl",
            "Implementation of linear layers and norms: Transformer Engine if it is installed, on CUDA; "
            "inference_optimized means local",
            choices=TRANSFORMER_IMPLEMENTATIONS,
        ),
        Flag("dtype", "Type of the parameters; auto: bfloat16 on CUDA, float32 elsewhere", choices=PARAMETER_TYPES),
        Flag("bf16", "Use bfloat16 parameters"),
        Flag("fp16", "Use float16 parameters"),
        Flag("seed", "Seed of random weights and of each request's random generator"),
        Flag("inference_sampling_seed", "Seed of each request's random generator; default: --seed"),
    ),
)

TOKENIZER = FlagGroup(
    "tokenizer",
    TokenizerConfig,
    (
        Flag(
            "tokenizer_type",
            "Kind of tokenizer; default: the checkpoint's. NullTokenizer: texts are token ids separated by spaces",
            choices=TOKENIZER_TYPES,
        ),
        Flag(
            "tokenizer_model",
            "Tokenizer's directory or file, or its name on the Hugging Face hub; default: the checkpoint's",
            metavar="PATH",
        ),
        Flag("vocab_file", "vocab.json of a GPT2BPETokenizer", metavar="FILE"),
        Flag("merge_file", "merges.txt of a GPT2BPETokenizer", metavar="FILE"),
        Flag(
            "tiktoken_pattern", "Pattern by which a TikTokenizer splits texts; default: v2", choices=TIKTOKEN_PATTERNS
        ),
        Flag("tiktoken_num_special_tokens", "Number of ids of a TikTokenizer before its file's ids; default: 1000"),
        Flag(
            "use_tokenizer_model_from_checkpoint_args",
            "Without a tokenizer beside the checkpoint, use the tokenizer that its arguments name, if it exists",
        ),
        Flag("chat_template", "Jinja file of the chat template; default: the tokenizer's", metavar="FILE"),
    ),
)
