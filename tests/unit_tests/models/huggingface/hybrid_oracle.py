"""Random tiny models of recurrent and hybrid families made by transformers: an implementation that we did not write.

Slow decay, as in nemotron_h_oracle.py, where what serves every family is: prompts, logits, tolerance. Only full
forwards are compared with: transformers' own resumption over several tokens loses states of some of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle


@dataclass(frozen=True)
class Shape:
    """Architecture and its special settings."""

    name: str
    family: str
    seed: int
    fields: dict = field(default_factory=dict)  # of the family's configuration, over those of _SMALL


_CLASSES = {
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM"),
    "bamba": ("BambaConfig", "BambaForCausalLM"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM"),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
}
_DECODER = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 32}
_SMALL = {
    "mamba2": {
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 16,
        "chunk_size": 32,
    },
    "bamba": {**_DECODER, **_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_DECODER,
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.5,
    },
    "lfm2": {
        **_DECODER,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 8,
        "tie_word_embeddings": False,
    },
}

_FALCON_H1_MULTIPLIERS = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
}
_SMALL["falcon_h1"] = {**_DECODER, **_MAMBA2, "mamba_d_ssm": 48} | _FALCON_H1_MULTIPLIERS

_DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_SMALL["qwen3_5_text"] = {**_DECODER, **_DELTA_NET, "head_dim": 16}
_SMALL["qwen3_5"] = {
    "text_config": _SMALL["qwen3_5_text"] | {"rms_norm_eps": 1e-2},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_SMALL["qwen3_5_moe_text"] = {
    **{name: value for name, value in _SMALL["qwen3_5_text"].items() if name != "intermediate_size"},
    **_EXPERTS,
}
_SMALL["qwen3_5_moe"] = _SMALL["qwen3_5"] | {"text_config": _SMALL["qwen3_5_moe_text"]}
_SMALL["lfm2_moe"] = {
    **_DECODER,
    "layer_types": ["conv", "conv", "full_attention"],
    "num_dense_layers": 1,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
_SMALL["olmo_hybrid"] = {**_DECODER, **_DELTA_NET, "rms_norm_eps": 1e-3}
_NORMS_AROUND_ZERO = ("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")

SHAPES = (
    Shape("mamba2", "mamba2", seed=1),
    Shape(
        "mamba2, one group, tied, other width, window and epsilon",
        "mamba2",
        seed=1,
        fields={
            "tie_word_embeddings": True,
            "n_groups": 1,
            "expand": 3,
            "num_heads": 6,
            "head_dim": 16,
            "conv_kernel": 3,
            "layer_norm_epsilon": 1e-2,
        },
    ),
    Shape("bamba", "bamba", seed=1),
    Shape(
        "bamba, MHA, one group, other base, epsilon and width, tied",
        "bamba",
        seed=1,
        fields={
            "num_key_value_heads": 4,
            "mamba_n_groups": 1,
            "mamba_expand": 3,
            "mamba_n_heads": 6,
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    Shape("granite, dense", "granitemoehybrid", seed=1),
    Shape(
        "granite, experts, rotary, tied",
        "granitemoehybrid",
        seed=53,
        fields={
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    Shape("lfm2, tied", "lfm2", seed=1, fields={"tie_word_embeddings": True}),
    Shape(
        "lfm2, MHA, other window, base, width and epsilon",
        "lfm2",
        seed=1,
        fields={
            "num_key_value_heads": 4,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    Shape("falcon_h1, no norm", "falcon_h1", seed=1),
    Shape("falcon_h1, norm first", "falcon_h1", seed=1, fields={"mamba_rms_norm": True}),
    Shape(
        "falcon_h1, gate first, MHA, one group, wide heads, tied",
        "falcon_h1",
        seed=5,
        fields={
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "num_key_value_heads": 4,
            "head_dim": 12,
            "mamba_n_groups": 1,
            "mamba_d_ssm": None,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
        },
    ),
    Shape(
        "qwen3_5, as many heads, other window, base and share, yarn",
        "qwen3_5_text",
        seed=1,
        fields={
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    Shape("qwen3_5, that reads images too", "qwen3_5", seed=1),
    Shape("qwen3_5 moe", "qwen3_5_moe_text", seed=1),
    Shape("qwen3_5 moe, that reads images too", "qwen3_5_moe", seed=1),
    Shape("lfm2 moe", "lfm2_moe", seed=1),
    Shape("olmo", "olmo_hybrid", seed=1),
    Shape(
        "olmo, no positions, strength to 1, MHA, other heads and window, tied",
        "olmo_hybrid",
        seed=1,
        fields={
            "linear_allow_neg_eigval": False,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_conv_kernel_dim": 3,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
)


def make(shape: Shape, directory: Path) -> PreTrainedModel:
    """A model of a shape, saved to a directory by transformers itself."""
    torch.manual_seed(shape.seed)
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[shape.family])
    model = model_class(config_class(**(_SMALL[shape.family] | shape.fields))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones once
            around = 0 if shape.family in _NORMS_AROUND_ZERO and _is_outer_norm(name) else 1
            parameter.copy_(_value(name, parameter, around))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(directory)
    return model


def _is_outer_norm(name: str) -> bool:
    """Return whether the name is of a norm outside the gated delta net."""
    return "norm" in name.removesuffix(".weight").rsplit(".", 1)[-1] and "linear_attn" not in name


def _value(name: str, parameter: Tensor, norms_around: int) -> Tensor:
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    noise = torch.randn_like(parameter)
    if kind == "A_log":
        return torch.empty_like(parameter).uniform_(0.01, 0.1).log()
    if kind == "dt_bias":
        return torch.empty_like(parameter).uniform_(0.01, 0.05).expm1().log()
    if kind == "D":
        return 0.3 * noise
    if "norm" in kind:
        return norms_around + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if kind in ("embeddings", "embed_tokens"):
        return 0.5 * noise
    gain = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 1.0, "router": 3.0}.get(kind, 1.2)
    inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
    return noise * gain / math.sqrt(inputs)


@torch.no_grad()
def routing_margin(model: nn.Module, tokens: list[int]) -> float:
    """Smallest margin, over all tokens, by which a router prefers its choice; infinite without routers."""
    margins = [math.inf]

    def note(router: nn.Module, args: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        scores = outputs[0] if len(args) == 1 else outputs[0].sigmoid() + args[1]  # with a bias for choosing
        ranked = scores.sort(descending=True).values
        margins.append((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min().item())

    routers = [m for name, m in model.named_modules() if name.endswith(("router", "mlp.gate", "feed_forward.gate"))]
    hooks = [router.register_forward_hook(note) for router in routers]
    oracle.their_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min(margins)
