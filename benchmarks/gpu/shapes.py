"""The models that are measured, and the engines around them."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.gpu.work import OWN, Work
from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.build import build_model
from megatron_ext.text.tokenizer import NullTokenizer

BLOCK = 64
GRAPHS = 4  # sizes of decode batches: capturing the default of 16 for each engine would take the time of the rest
WORK = Work()
QUICK = Work("float32", (256, 512), (1, 2), (1, 2), 2, 512)
LARGE = ModelConfig(
    hybrid_override_pattern="M-M-M-M*-" * 5,
    hidden_size=2560,
    ffn_hidden_size=10_240,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    mamba_state_dim=128,
    mamba_head_dim=64,
    mamba_num_heads=80,
    mamba_num_groups=8,
    squared_relu=True,
    vocab_size=WORK.vocabulary,
    max_position_embeddings=65_536,
)
SMALL = dataclasses.replace(
    LARGE,
    hybrid_override_pattern="M-M*-",
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    mamba_state_dim=32,
    mamba_head_dim=32,
    mamba_num_heads=8,
    mamba_num_groups=2,
    vocab_size=QUICK.vocabulary,
    max_position_embeddings=4096,
)
DELTA_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
SMALL_DELTA_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
KINDS = ("mamba2", "gated_delta_net", "mamba1")


def model_config(kind: str, like: ModelConfig) -> ModelConfig:
    """Return `like` with recurrent layers of the given kind."""
    heads = SMALL_DELTA_HEADS if like is SMALL else DELTA_HEADS
    fields = heads if kind == "gated_delta_net" else {}
    return dataclasses.replace(like, recurrent_layer=kind, **fields)


def filled_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 3) -> torch.nn.Module:
    """Build a model with random weights made on the device: billions of weights take minutes on a host."""
    model = build_model(config, dtype=dtype, device=device, seed=seed, perform_initialization=False)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.endswith(".weight"):
                parameter.normal_(std=0.02, generator=generator)
    return model


def engine_for(
    model: torch.nn.Module,
    config: ModelConfig,
    dtype: torch.dtype,
    requests: int,
    length: int,
    slots: int = 8,
    **batching: object,
) -> InferenceEngine:
    """Build an engine with room for three times the longest requests and for `slots` snapshots per request.

    Steps have the default number of tokens of a CUDA device.

    Steps have as many tokens as they have by default on a CUDA device.
    """
    settings = BatchingConfig(
        block_size=BLOCK,
        block_count=3 * requests * (length // BLOCK + 2),
        max_requests=requests,
        max_tokens=max(256, requests, min(16_384, length)),
        num_cuda_graphs=GRAPHS,
        **batching,
    )
    cache = CacheConfig(snapshot_slots=slots * requests)
    return build_engine(model, config, NullTokenizer(config.vocab_size), settings, cache, dtype=dtype)


def longest(prefix: int) -> int:
    """Tokens of a request after a prefix, with the one that it generates."""
    return prefix + OWN + 1
