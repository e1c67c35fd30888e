"""Random tiny Mamba, FalconMamba and Jamba models made by transformers: an implementation that we did not write.

Slow decay, as in nemotron_h_oracle.py, where what serves every family is: prompts, logits, tolerance. Only full
forwards are compared with: transformers' own resumption over several tokens loses states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)


@dataclass(frozen=True)
class Shape:
    """Architecture and its special settings."""

    name: str
    family: str
    seed: int
    fields: dict = field(default_factory=dict)  # of the family's configuration, over those of _SMALL


_FAMILIES = {
    "mamba": (MambaConfig, MambaForCausalLM),
    "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM),
    "jamba": (JambaConfig, JambaForCausalLM),
}
_SMALL_MAMBA = {"vocab_size": 101, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3}
_SMALL = {
    "mamba": _SMALL_MAMBA,
    "falcon_mamba": _SMALL_MAMBA | {"tie_word_embeddings": False},
    "jamba": {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "mamba_d_state": 8,
        "max_position_embeddings": 512,
    },
}

SHAPES = (
    Shape("mamba, tied", "mamba", seed=1),
    Shape(
        "mamba, other rank, window, width and epsilon",
        "mamba",
        seed=2,
        fields={
            "tie_word_embeddings": False,
            "time_step_rank": 7,
            "conv_kernel": 3,
            "expand": 3,
            "layer_norm_epsilon": 1e-2,
            "state_size": 5,
        },
    ),
    Shape("falcon", "falcon_mamba", seed=3),
    Shape(
        "falcon, tied, other epsilons and width",
        "falcon_mamba",
        seed=4,
        fields={"tie_word_embeddings": True, "mixer_rms_eps": 0.1, "expand": 16, "intermediate_size": 72},
    ),
    Shape("jamba", "jamba", seed=5),
    Shape(
        "jamba, MHA, tied, epsilon and rank",
        "jamba",
        seed=8,
        fields={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "mamba_dt_rank": 3,
            "mamba_d_conv": 3,
            "mamba_expand": 3,
        },
    ),
    Shape(
        "jamba, experts",
        "jamba",
        seed=39,
        fields={"num_experts": 6, "expert_layer_period": 2, "expert_layer_offset": 0},
    ),
    Shape(
        "jamba, one expert a token",
        "jamba",
        seed=8,
        fields={"num_experts": 4, "num_experts_per_tok": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    ),
)


def make(shape: Shape, directory: Path) -> PreTrainedModel:
    """A model of a shape, saved to a directory by transformers itself."""
    torch.manual_seed(shape.seed)
    config_class, model_class = _FAMILIES[shape.family]
    config = config_class(**(_SMALL[shape.family] | shape.fields))
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_value(name, parameter))
    model.save_pretrained(directory)
    return model


def _value(name: str, parameter: Tensor) -> Tensor:
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind == "A_log":
        return torch.empty_like(parameter).uniform_(0.01, 0.1).log()
    if name.endswith("dt_proj.bias"):
        return torch.empty_like(parameter).uniform_(0.01, 0.05).expm1().log()
    if kind == "D":
        return torch.randn_like(parameter) * 0.3
    if "norm" in kind:
        return 1 + 0.2 * torch.randn_like(parameter)
    if name.endswith("conv1d.bias"):
        return 0.3 * torch.randn_like(parameter)
    if kind in ("embeddings", "embed_tokens"):
        return torch.randn_like(parameter)
    gain = {"dt_proj": 0.3, "x_proj": 2.0, "in_proj": 2.0, "lm_head": 1.0, "router": 3.0}.get(kind, 1.2)
    inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
    return torch.randn_like(parameter) * gain / math.sqrt(inputs)


@torch.no_grad()
def routing_margin(model: nn.Module, tokens: list[int]) -> float:
    """Smallest margin, over all tokens, by which a router prefers its choice; infinite without routers."""
    margins = [math.inf]

    def note(router: nn.Module, args: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        ranked = outputs[0].softmax(-1).sort(descending=True).values
        margins.append((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min().item())

    hooks = [m.register_forward_hook(note) for name, m in model.named_modules() if name.endswith("router")]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return min(margins)
