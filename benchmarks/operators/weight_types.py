"""Differences of log-probs that come from the type of weights on CPUs: 16 bits, and int8 by quantization."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.cases import Run, case, token_ids
from benchmarks.models import engine, random_model
from megatron_ext.config import ModelConfig, RequestParams, SourceConfig
from megatron_ext.models.load import LoadedModel, load_model

SIZES = {
    "0.25 B": ModelConfig(
        hybrid_override_pattern="M-M-M-M*-" * 4,
        hidden_size=1024,
        ffn_hidden_size=2048,
        num_attention_heads=16,
        num_query_groups=4,
        kv_channels=64,
        mamba_num_heads=32,
        mamba_head_dim=64,
        mamba_state_dim=128,
        mamba_num_groups=1,
        squared_relu=True,
        vocab_size=32_000,
        max_position_embeddings=16_384,
    ),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32, "int8 bf16": torch.bfloat16}
SHOWN = RequestParams(num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)


@case("operators", quick={"sizes": ("embedded",), "tokens": 32})
def weight_types(run: Run, sizes: tuple = ("embedded", *SIZES), tokens: int = 512) -> None:
    """Log-probs of a random prompt by the type of weights, beside fp32: mean and largest difference; random weights."""
    for size in sizes:
        exact = _log_probs(size, torch.float32, "none", tokens)
        for name, dtype in TYPES.items():
            found = _log_probs(size, dtype, "int8" if name.startswith("int8") else "none", tokens)
            difference = (found - exact).abs()
            run.row(
                f"{size} {name}",
                {
                    "mean difference": difference.mean().item(),
                    "largest": difference.max().item(),
                    "perplexity over fp32's": (exact.mean() - found.mean()).exp().item(),
                },
            )


def _log_probs(size: str, dtype: torch.dtype, quantization: str, tokens: int) -> torch.Tensor:
    """Return the log-prob of each token of a prompt after the first: [tokens - 1]."""
    loaded = _loaded(size)
    loaded.model.to(dtype)
    built = engine(dataclasses.replace(loaded, dtype=dtype), cpu_weight_quantization=quantization, max_requests=1)
    vocabulary = loaded.config.vocab_size
    assert vocabulary is not None, "every model here has one"
    (record,) = built.generate([token_ids(tokens, "weight types", vocabulary)], SHOWN)
    return torch.tensor(record.prompt_log_probs)


def _loaded(size: str) -> LoadedModel:
    if size not in SIZES:
        return load_model(SourceConfig(), {}, device=torch.device("cpu"))
    torch.manual_seed(0)
    return random_model(SIZES[size], device=torch.device("cpu"))
