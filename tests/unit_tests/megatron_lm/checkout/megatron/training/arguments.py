"""STAND-IN (see the package): the flags that the tests give, and defaults of what the scripts read."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.training import set_args

BATCHING = "inference_dynamic_batching"
VALUES = {
    "load": None,
    "seed": 1234,
    "model_provider": "gpt",
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 55,
    "cuda_graph_impl": "none",
    "inference_max_seq_length": 256,
    "inference_logging_step_interval": 0,
    f"{BATCHING}_buffer_size_gb": 0.01,
    f"{BATCHING}_paused_buffer_size_gb": None,
    f"{BATCHING}_block_size": 16,
    f"{BATCHING}_max_requests": 8,
    f"{BATCHING}_max_tokens": 256,
    f"{BATCHING}_num_cuda_graphs": 16,
    f"{BATCHING}_unified_memory_level": 0,
    f"{BATCHING}_cuda_graph_max_tokens": None,
    f"{BATCHING}_cuda_graph_mixed_prefill_count": 16,
    f"{BATCHING}_prefix_caching_mamba_gb": None,
}
SWITCHES = (
    *("disable_chunked_prefill", "enable_chunked_prefill", "legacy_tokenizer", "inference_wandb_logging"),
    *(f"{BATCHING}_prefix_caching", f"{BATCHING}_track_paused_request_events", "decode_only_cuda_graphs"),
)
# No flags: of the model, or of features that are off.
FIXED = {
    "params_dtype": torch.float32,
    "num_layers": 4,
    "kv_channels": 8,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "multi_latent_attention": False,
    "cache_mla_latents": False,
    "qk_pos_emb_head_dim": 64,
    "rl_offload_kv_cache_during_training": False,
    "rl_kv_cache_management_mode": "persist",
    "rl_persist_cuda_graphs": False,
    "inference_cuda_graph_scope": "none",
    "transformer_impl": "local",
    "tokenizer_metadata": None,
    "metadata_path": None,
    "pad_vocab_size": False,
    "profile": False,
    "rank": 0,
    "world_size": 1,
    "fp8_recipe": None,
}


def parse_and_validate_args(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> Namespace:
    parser = ArgumentParser(allow_abbrev=False)
    for name, default in VALUES.items():
        if name != "model_provider":
            kind = float if name.endswith("_gb") else int if isinstance(default, int) else str
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    for name in SWITCHES:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    if extra_args_provider is not None:
        extra_args_provider(parser)
    args = parser.parse_args()
    for name, value in {**FIXED, **(args_defaults or {})}.items():
        setattr(args, name, value)
    set_args(args)
    return args
