"""Tiny models whose states matter: they decay slowly, so that hundreds of tokens later they still show in the logits.

With the usual initialisation a lost state changes almost nothing, and a test that compares tokens passes with a broken
engine. The negative controls in `mcore/test_negative_controls.py` prove that these models see every corruption.
"""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.models.mamba import MambaModel
from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.mcore import platform
from megatron_ext.mixers.gated_delta_net import GatedDeltaNetMixer
from megatron_ext.mixers.mamba1 import Mamba1Mixer
from megatron_ext.mixers.mamba2 import Mamba2Mixer
from megatron_ext.mixers.mixer import inverse_softplus
from megatron_ext.models.build import build_model
from tests.unit_tests.support.mamba1 import slow_down_mamba1

VOCABULARY = 97

# GQA (4 query heads share 2 key heads), two Mamba groups, an MLP, and a convolution window of 4.
HYBRID = ModelConfig(
    hybrid_override_pattern="M*-M*-",
    hidden_size=48,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    mamba_state_dim=16,
    mamba_head_dim=12,
    mamba_num_heads=4,
    mamba_num_groups=2,
    mamba_chunk_size=32,
    untie_embeddings_and_output_weights=True,  # else a random model repeats its input
    max_position_embeddings=2048,
    vocab_size=VOCABULARY,
)
ATTENTION_ONLY = dataclasses.replace(HYBRID, hybrid_override_pattern="*-*-", position_embedding_type="rope")
ATTENTION_FREE = dataclasses.replace(HYBRID, hybrid_override_pattern="M-M-")
# Two value heads share a key head; key and value channels differ; another window than Mamba-2's.
GATED_DELTA_NET = dataclasses.replace(
    HYBRID,
    recurrent_layer="gated_delta_net",
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=3,
)
# Norms of dt, B and C as Jamba has them; another window than Mamba-2's.
MAMBA1 = dataclasses.replace(
    HYBRID,
    recurrent_layer="mamba1",
    mamba_state_dim=8,
    mamba_dt_rank=5,
    mamba_conv_kernel=3,
    mamba_inner_norm="weighted",
)
MAMBA1_ONLY = dataclasses.replace(MAMBA1, hybrid_override_pattern="MM", mamba_inner_norm="none")
EXPERTS = dataclasses.replace(
    HYBRID,
    hybrid_override_pattern="ME*E",
    num_experts=4,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=24,
)
# Two layers with keys, values and states each, of which the parts of the projection have factors.
SIDE_BY_SIDE = dataclasses.replace(
    HYBRID,
    hybrid_override_pattern="P-P-",
    position_embedding_type="rope",
    mamba_gated_norm="norm_first",
    mamba_multipliers=(0.8, 1.25, 0.9, 1.1, 0.7),
    attention_output_multiplier=0.7,
    recurrent_output_multiplier=1.3,
)
SHORT_CONV = dataclasses.replace(
    HYBRID, recurrent_layer="short_conv", short_conv_kernel_dim=5, hybrid_override_pattern="M-*-MM"
)
CONFIGS = {
    "side_by_side": SIDE_BY_SIDE,
    "short_conv": SHORT_CONV,
    "hybrid": HYBRID,
    "attention_only": ATTENTION_ONLY,
    "attention_free": ATTENTION_FREE,
    "gated_delta_net": GATED_DELTA_NET,
    "mamba1": MAMBA1,
    "mamba1_only": MAMBA1_ONLY,
    "experts": EXPERTS,
}


def build_slow_decay(config: ModelConfig, *, seed: int = 5) -> MambaModel:
    """A random model in fp32 on the device that engines use, with lively logits and slowly decaying states."""
    model = build_model(config, device=torch.device("cpu"), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                std = 0.3 if "embedding" in name or "output_layer" in name else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        for module in model.modules():
            if isinstance(module, Mamba2Mixer):
                slow_down(module, generator)
            elif isinstance(module, GatedDeltaNetMixer):
                slow_down_delta_net(module, generator)
            elif isinstance(module, Mamba1Mixer):
                slow_down_mamba1(module, generator)
    return model.to(platform.device())


def slow_down(mixer: Mamba2Mixer, generator: torch.Generator) -> None:
    """Let a state halve over some hundred tokens and more: A in 0.01 .. 0.1, dt around 0.01 .. 0.05 (in place)."""
    heads = mixer.nheads_local
    _uniform(mixer.A_log, 0.01, 0.1, generator).log_()
    dt = _uniform(mixer.dt_bias, 0.01, 0.05, generator)
    mixer.dt_bias.copy_(inverse_softplus(dt))
    mixer.in_proj.weight[-heads:] *= 0.3  # what dt gets from the token
    mixer.in_proj.weight[mixer.d_inner_local : -heads] *= 2.0  # x, B, C
    mixer.D.fill_(0.05)  # the way past the state
    _uniform(mixer.norm.weight, 0.5, 1.5, generator)


def slow_down_delta_net(mixer: GatedDeltaNetMixer, generator: torch.Generator) -> None:
    """Slow the decay of a gated delta net, in place, and make it overwrite little: the delta rule forgets on writes."""
    heads = mixer.value_heads_local
    _uniform(mixer.A_log, 0.01, 0.1, generator).log_()
    mixer.dt_bias.copy_(inverse_softplus(_uniform(mixer.dt_bias, 0.01, 0.05, generator)))
    mixer.in_proj.weight[-heads:] *= 0.3  # what alpha gets from the token
    mixer.in_proj.weight[-2 * heads : -heads] *= 0.3  # beta: the strength stays near one half
    mixer.in_proj.weight[: mixer.conv_dim] *= 2.0  # q, k, v
    _uniform(mixer.out_norm.weight, 0.5, 1.5, generator)


def _uniform(parameter: nn.Parameter, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return parameter.uniform_(low, high, generator=generator)
