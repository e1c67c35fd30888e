"""Random tiny Qwen3-Next models made by transformers: an implementation that we did not write.

Slow decay, so that a lost or misread state is visible, and weights large enough for logits that are not flat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle


@dataclass(frozen=True)
class Shape:
    """Architecture and its special settings."""

    name: str
    seed: int
    tied: bool = False
    fields: dict = field(default_factory=dict)  # of Qwen3NextConfig, over _SMALL


_SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 0,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}

SHAPES = (
    Shape("dense", seed=1),
    Shape(
        "other heads, window, base, share and epsilon, tied",
        seed=9,
        tied=True,
        fields={
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_key_value_heads": 1,
            "head_dim": 12,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        },
    ),
    Shape("experts", seed=3, fields={"num_experts": 6}),
    Shape(
        "experts in some layers",
        seed=4,
        fields={
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        },
    ),
)


def make(shape: Shape, directory: Path) -> Qwen3NextForCausalLM:
    """A model of a shape, saved to a directory by transformers itself."""
    torch.manual_seed(shape.seed)
    config = Qwen3NextConfig(**(_SMALL | shape.fields), tie_word_embeddings=shape.tied)
    model = Qwen3NextForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones once
            parameter.copy_(_value(name, parameter, config))
    model.save_pretrained(directory)
    return model


def _value(name: str, parameter: Tensor, config: Qwen3NextConfig) -> Tensor:
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    noise = torch.randn_like(parameter)
    if kind == "A_log":
        return torch.empty_like(parameter).uniform_(0.01, 0.1).log()
    if kind == "dt_bias":
        return torch.empty_like(parameter).uniform_(0.01, 0.05).expm1().log()
    if "norm" in kind:  # those of the gated delta net are around one, the others around zero
        return 0.2 * noise + name.endswith("linear_attn.norm.weight")
    if kind == "embed_tokens":
        return 0.5 * noise
    gain = {"conv1d": 1.0, "q_proj": 2.0, "k_proj": 2.0, "lm_head": 1.0, "in_proj_ba": 0.3}.get(kind, 1.2)
    inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
    return noise * gain / math.sqrt(inputs)


@torch.no_grad()
def routing_margin(model: Qwen3NextForCausalLM, tokens: list[int]) -> float:
    """Smallest margin, over all tokens, by which a router prefers the last expert that it chooses."""
    margins: list[float] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, _, output: margins.append(_gap(output[0], gate.top_k)))
        for layer in model.model.layers
        if hasattr(layer.mlp, "experts")
    ]
    oracle.their_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(margins, default=math.inf)


def _gap(logits: Tensor, chosen: int) -> float:
    ranked = logits.sort(descending=True).values
    return (ranked[:, chosen - 1] - ranked[:, chosen]).min().item()
