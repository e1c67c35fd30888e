"""A GPT with gated delta nets that Megatron-LM trained: upstream's own model, as it describes itself."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megatron_ext.config import RECURRENT_KINDS, ModelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.mcore.layer_specs import recurrent_layer_spec
from megatron_ext.models.build import transformer_config
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.models.megatron.megatron_lm import GPT
from tests.unit_tests.support.saved_models import load_dist_checkpoint
from tests.unit_tests.support.upstream_delta_net import allow, without_kernels

TOKENS = oracle.prompt(70, seed=0, vocab_size=50)
CONFIG = dataclasses.replace(
    GPT,
    hybrid_override_pattern="M-*-M-",
    recurrent_layer="gated_delta_net",
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=3,
    swiglu=True,
    qk_layernorm=True,
    norm_epsilon=1e-6,
)
FREQUENCY = [1, 0, 1]
IN_PROJ = "decoder.layers.0.self_attention.in_proj"


def upstream_model(patch: pytest.MonkeyPatch, config: ModelConfig) -> GPTModel:
    """Upstream's layers, without Transformer Engine: norms stand alone, under the keys of fused ones."""
    allow(patch)
    platform.initialize()
    settings = without_kernels(transformer_config(config, torch.float32))
    settings.num_layers, settings.linear_attention_freq = len(FREQUENCY), FREQUENCY
    attention = get_gpt_layer_local_spec(qk_layernorm=True, normalization=config.normalization)
    parts = recurrent_layer_spec(RECURRENT_KINDS["gated_delta_net"]).submodules.mixer.submodules
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(parts.in_proj, parts.out_norm, parts.out_proj),
    )
    keys = {
        "input_layernorm.": "self_attention.in_proj.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    submodules = dataclasses.replace(
        attention.submodules,
        self_attention=delta_net,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=keys,
    )
    linear = dataclasses.replace(attention, submodules=submodules)
    layers = [linear if is_linear else attention for is_linear in FREQUENCY]
    model = GPTModel(
        settings,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=attention.submodules.input_layernorm),
        config.vocab_size,
        config.max_position_embeddings,
        position_embedding_type=config.position_embedding_type,
        share_embeddings_and_output_weights=True,
    )
    return fill(model.eval())


@torch.no_grad()
def fill(model: GPTModel) -> GPTModel:
    """Every parameter is random: upstream's initialisation was left out."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter[0].numel() ** -0.5 * (3 if "embedding" in name else 1))
        else:
            parameter.copy_(0.3 * noise + ("norm" in name) - 3.0 * name.endswith(("A_log", "dt_bias")))
    return model


def arguments(**changes: object) -> Namespace:
    names = [field for field in CONFIG.to_dict() if field.startswith("linear_")]
    fields = {name: getattr(CONFIG, name) for name in (*names, "qk_layernorm")}
    fields |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": FREQUENCY}
    return megatron_lm.gpt_arguments(CONFIG, **(fields | changes))


def their_logits(model: GPTModel) -> Tensor:
    length = len(TOKENS)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with torch.no_grad():
        return model(torch.tensor([TOKENS]), torch.arange(length)[None], mask)[0]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> GPTModel:
    return upstream_model(monkeypatch, CONFIG)


@pytest.mark.parametrize("fused", [True, False], ids=["Transformer Engine", "local"])
def test_logits_are_upstreams(fused: bool, model: GPTModel, tmp_path: Path) -> None:
    """LA-2: training checkpoints of upstream load with equal logits; norms are fused, or as local specs write them."""
    if not fused:
        for layer in model.decoder.layers:
            layer.submodules_config.sharded_state_dict_keys_map.clear()
    write_state({"model": model.sharded_state_dict(), "args": arguments()}, tmp_path)
    keys = dist_checkpointing.load_tensors_metadata(str(tmp_path)).keys()
    assert f"{IN_PROJ}.weight.query" in keys
    assert (f"{IN_PROJ}.layer_norm_weight" in keys) == fused
    loaded, config = load_dist_checkpoint(tmp_path)
    assert config.hybrid_override_pattern == CONFIG.hybrid_override_pattern
    theirs = their_logits(model)
    assert theirs.std() > 0.3
    torch.testing.assert_close(oracle.our_logits(loaded, TOKENS), theirs, atol=oracle.ATOL, rtol=oracle.RTOL)
