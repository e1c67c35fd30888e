"""Random tiny models with attention in every layer, made by transformers: an implementation that we did not write.

What serves every family (prompts, logits, tolerance) is in nemotron_h_oracle.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle

LONGEST = 512


@dataclass(frozen=True)
class Shape:
    """Architecture and its special settings."""

    name: str
    model_type: str
    seed: int
    tied: bool = False
    fields: dict = field(default_factory=dict)  # of the family's configuration, over _SMALL


_SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Wavelengths of 6 to 20000 tokens and an original length of 64: the first stay, the last are stretched.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
WIDE_YARN = YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}
ALL_WINDOWED = {"use_sliding_window": True, "sliding_window": 100}

SHAPES = (
    Shape(
        "llama, biases of attention, yarn",
        "llama",
        seed=1,
        fields={"attention_bias": True, "rope_parameters": YARN, "head_dim": 16},
    ),
    Shape("llama, biases of MLPs, tied", "llama", seed=2, tied=True, fields={"mlp_bias": True}),
    Shape("qwen2", "qwen2", seed=3, fields={"num_key_value_heads": 4}),
    Shape(
        "qwen2, window, yarn, tied",
        "qwen2",
        seed=4,
        tied=True,
        fields={
            "use_sliding_window": True,
            "sliding_window": 48,
            "max_window_layers": 1,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "rope_parameters": WIDE_YARN,
        },
    ),
    Shape("qwen3", "qwen3", seed=5, fields={"head_dim": 12}),
    Shape(
        "qwen3, biases, other epsilon and base",
        "qwen3",
        seed=25,
        fields={
            "head_dim": 8,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    Shape("qwen3 moe", "qwen3_moe", seed=7, fields=EXPERTS | {"norm_topk_prob": True, "head_dim": 12}),
    Shape(
        "qwen3 moe, sums of weights, MLPs in some layers",
        "qwen3_moe",
        seed=27,
        fields=EXPERTS
        | {
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    Shape(
        "qwen3 moe, one expert a token", "qwen3_moe", seed=9, fields=EXPERTS | {"num_experts_per_tok": 1} | ALL_WINDOWED
    ),
    Shape("mistral", "mistral", seed=10, fields={"head_dim": 12, "sliding_window": None}),
    Shape("mistral, window", "mistral", seed=11, tied=True, fields={"sliding_window": 40}),
    Shape("mixtral", "mixtral", seed=12, fields={"num_local_experts": 6, "num_experts_per_tok": 2}),
    Shape(
        "gpt-oss",
        "gpt_oss",
        seed=13,
        fields=GPT_OSS | {"rope_parameters": WIDE_YARN, "num_hidden_layers": 4, "sliding_window": 40},
    ),
    Shape(
        "gpt-oss, listed windows, low limit",
        "gpt_oss",
        seed=15,
        fields=GPT_OSS
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 100,
            "swiglu_limit": 0.6,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 3,
        },
    ),
)


def make(shape: Shape, directory: Path) -> PreTrainedModel:
    """A model of a shape, saved to a directory by transformers itself."""
    torch.manual_seed(shape.seed)
    config = AutoConfig.for_model(shape.model_type, **(_SMALL | shape.fields), tie_word_embeddings=shape.tied)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones once
            parameter.copy_(_value(name, parameter))
    model.save_pretrained(directory)
    return model


def _value(name: str, parameter: Tensor) -> Tensor:
    """Attention that prefers some positions, routers that choose, and logits that are not flat."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    noise = torch.randn_like(parameter)
    if kind.endswith("bias"):
        return 0.4 * noise
    if kind == "sinks":
        return 1 + 2 * noise
    if "norm" in kind:
        return 1 + 0.2 * noise
    if kind == "embed_tokens":
        return 0.2 * noise
    gain = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 1.0}.get(kind, 1.2)
    return noise * gain / math.sqrt(parameter.shape[-1])


@torch.no_grad()
def routing_margin(model: PreTrainedModel, tokens: list[int]) -> float:
    """Smallest margin, over all tokens, by which a router prefers the last expert that it chooses."""
    margins: list[float] = []

    def note(gate: nn.Module, _: object, output: tuple[Tensor, ...]) -> None:
        ranked = output[0].sort(descending=True).values
        margins.append((ranked[:, gate.top_k - 1] - ranked[:, gate.top_k]).min().item())

    experts = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    gates = [layer.gate if hasattr(layer, "gate") else layer.router for layer in experts]
    hooks = [gate.register_forward_hook(note) for gate in gates]
    oracle.their_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(margins, default=math.inf)
