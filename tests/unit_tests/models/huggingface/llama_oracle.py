"""Random tiny Llama models made by transformers: an implementation that we did not write.

What serves every family (prompts, logits, tolerance) is in nemotron_h_oracle.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """Architecture and its special settings."""

    name: str
    seed: int
    tied: bool = False
    fields: dict = field(default_factory=dict)  # of LlamaConfig, over _SMALL


_SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES = (
    Shape("mha", seed=1),
    Shape("gqa, tied", seed=2, tied=True, fields={"num_key_value_heads": 2, "num_hidden_layers": 3}),
    Shape(
        "gqa, wide heads, other base and epsilon",
        seed=3,
        fields={
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    # Wavelengths of 6, 75, 888 and 10560 tokens: the last is beyond what scaling begins at, and seen in long prompts.
    Shape("scaled wavelengths", seed=5, fields={"rope_parameters": LLAMA_3_1 | {"rope_theta": 20000.0}}),
    Shape("mqa, tied, narrow MLP", seed=4, tied=True, fields={"num_key_value_heads": 1, "intermediate_size": 24}),
)


def make(shape: Shape, directory: Path) -> LlamaForCausalLM:
    """A model of a shape, saved to a directory by transformers itself."""
    torch.manual_seed(shape.seed)
    model = LlamaForCausalLM(LlamaConfig(**(_SMALL | shape.fields), tie_word_embeddings=shape.tied)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones once
            parameter.copy_(_value(name, parameter))
    model.save_pretrained(directory)
    return model


def _value(name: str, parameter: Tensor) -> Tensor:
    """Attention that prefers some positions, and logits that are not flat."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    noise = torch.randn_like(parameter)
    if "norm" in kind:
        return 1 + 0.2 * noise
    if kind == "embed_tokens":
        return 0.5 * noise
    gain = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 1.0}.get(kind, 1.2)
    return noise * gain / math.sqrt(parameter.shape[1])
