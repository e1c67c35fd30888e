"""The model that benchmarks run: shaped like NemotronH, random weights, the same in transformers and in our engine.

`python -m benchmarks.nemotron_shaped DIR` writes it down for others.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedModel

from megatron_ext.config import BatchingConfig, CacheConfig, SourceConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel, load_model

PATTERN = "M-M*M-M*"
VOCABULARY = 4096


@dataclass(frozen=True)
class Pair:
    """Pair of models with equal weights."""

    reference: PreTrainedModel
    ours: LoadedModel

    def engine(self, cache: CacheConfig | None = None, **batching: object) -> InferenceEngine:
        """A fresh engine around our model; nothing is cached unless `cache` says so."""
        ours = self.ours
        cache = cache or CacheConfig(enable_prefix_caching=False)
        return build_engine(
            ours.model, ours.config, ours.tokenizer, BatchingConfig(**batching), cache, dtype=ours.dtype
        )


def build_pair(device: torch.device, dtype: torch.dtype) -> Pair:
    """Random weights of a fixed seed, saved by transformers and loaded by us."""
    return pair_of(build_reference(), device, dtype)


def build_reference() -> PreTrainedModel:
    """The model of transformers."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=len(PATTERN),
        hybrid_override_pattern=PATTERN,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=16,
        mamba_head_dim=32,
        ssm_state_size=64,
        n_groups=2,
        chunk_size=128,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    reference = NemotronHForCausalLM(config)
    for layer in reference.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))  # its chunked path alone would clamp
    return reference


def pair_of(reference: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Pair:
    """A model of transformers, saved by itself and loaded by us."""
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        source = SourceConfig(load_hf=directory, bf16=dtype is torch.bfloat16)
        ours = load_model(source, {}, device=device)
    return Pair(reference.eval().to(device, dtype), ours)


def forward_flops(ours: LoadedModel, prompt_lengths: list[int], skipped: int = 0) -> float:
    """Operations that a prefill cannot do without: matrices once a token, causal attention, the scan's outer products.

    The output layer counts once a prompt, since only the last token's logits are needed.

    Args:
        ours: The model.
        prompt_lengths: Tokens of each prompt.
        skipped: Tokens at the start of each that are not computed.
    """
    config = ours.config
    matrices = sum(p.numel() for name, p in ours.model.named_parameters() if p.dim() == 2 and "decoder" in name)
    mamba, attention = PATTERN.count("M"), PATTERN.count("*")
    scan = mamba * 4 * config.mamba_heads * config.mamba_head_dim * config.mamba_state_dim
    per_token = 2 * matrices + scan
    computed = sum(prompt_lengths) - skipped * len(prompt_lengths)
    pairs = sum((length * (length + 1) - skipped * (skipped + 1)) / 2 for length in prompt_lengths)
    heads = config.num_attention_heads * config.head_channels
    head = 2 * config.hidden_size * VOCABULARY * len(prompt_lengths)
    return computed * per_token + attention * 4 * heads * pairs + head


if __name__ == "__main__":
    build_reference().save_pretrained(sys.argv[1])
