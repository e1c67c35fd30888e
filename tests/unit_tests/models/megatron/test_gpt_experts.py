"""GPT models with experts that Megatron-LM trained: upstream's own models, as they describe themselves."""

from __future__ import annotations

import dataclasses
import itertools
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.config.layers import moe_letters
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.models.build import transformer_config
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support import layouts
from tests.unit_tests.support.layouts import sizes
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.saved_models import load_dist_checkpoint

CPU = torch.device("cpu")
LAYERS = 4
TOKENS = oracle.prompt(40, seed=0, vocab_size=50)
BASE = dataclasses.replace(
    megatron_lm.GPT,
    swiglu=True,
    hybrid_override_pattern="*E" * LAYERS,
    num_experts=8,
    moe_ffn_hidden_size=24,
    moe_router_topk=3,
)
# Fields of each model, and the frequency of its layers with experts.
MODELS = {
    "sigmoid, shared experts, first layer dense": (
        {"moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 40},
        [0, 1, 1, 1],
    ),
    "sigmoid, expert bias, groups, scaling factor": (
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk": 4,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
        },
        2,
    ),
    "softmax of the chosen, stacked layers": ({"untie_embeddings_and_output_weights": True}, 1),
    "softmax of all, shared expert gate": (
        {
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": 16,
            "moe_shared_expert_gate": True,
            "swiglu": False,
            "squared_relu": True,
        },
        [1, 0, 0, 1],
    ),
}


GPT_OSS = "gpt-oss: sinks, windows, biases, YaRN, clamped gates"
YARN = {"yarn_original_max_position_embeddings": 16, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}
MODELS[GPT_OSS] = (
    {
        "swiglu": False,
        "quick_geglu": True,
        "activation_func_clamp_value": 0.6,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "disable_bias_linear": False,
        "attention_window": 12,
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_correction_range_round_to_int": False,
        **YARN,
    },
    1,
)
WINDOWS = {"window_size": (11, 0), "window_attn_skip_freq": 2}


def configured(name: str) -> ModelConfig:
    fields, freq = MODELS[name]
    mixers = "W*W*" if name == GPT_OSS else "*" * LAYERS
    pattern = "".join(map("".join, zip(mixers, moe_letters(freq, LAYERS), strict=True)))
    return dataclasses.replace(BASE, **fields, hybrid_override_pattern=pattern)


def arguments(name: str, **changes: object) -> Namespace:
    config = configured(name)
    fields = {field: value for field, value in config.to_dict().items() if field.startswith("moe_")}
    fields |= {"num_experts": config.num_experts, "moe_layer_freq": MODELS[name][1]}
    if name == GPT_OSS:
        fields |= {key: config.to_dict()[key] for key in MODELS[name][0] if not key.startswith(("yarn", "disable"))}
        fields |= WINDOWS | YARN | {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}
        fields |= {"yarn_correction_range_round_to_int": False, "mscale": 1.0, "mscale_all_dim": 0.0}
    return megatron_lm.gpt_arguments(config, **(fields | changes))


def upstream_model(name: str) -> GPTModel:
    """Upstream's GPT, of its own layers; only the product of its router is replaced, which needs CUDA there."""
    platform.initialize()
    config = configured(name)
    settings = dataclasses.replace(
        transformer_config(config, torch.float32), num_layers=LAYERS, moe_layer_freq=MODELS[name][1]
    )
    if name == GPT_OSS:
        for key, value in {**WINDOWS, **YARN, "yarn_correction_range_round_to_int": False}.items():
            setattr(settings, key, value)
    model = GPTModel(
        settings,
        get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization=config.normalization),
        config.vocab_size,
        config.max_position_embeddings,
        position_embedding_type="yarn" if name == GPT_OSS else config.position_embedding_type,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
    ).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5 * (3 if "embedding" in key else 1))
            else:
                parameter.copy_(0.3 * noise + ("norm" in key))
        for module in model.modules():
            if not isinstance(module, TopKRouter):
                continue
            module.gating = lambda hidden, router=module: F.linear(hidden, router.weight, router.bias)
            if module.expert_bias is not None:
                module.expert_bias.uniform_(-0.3, 0.3, generator=generator)
    return model


def windowed_mask(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """Upstream's mask, True where a key is hidden, on the CPU."""
    behind = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (behind < 0) | (behind > window[0])


def their_logits(model: GPTModel) -> Tensor:
    length = len(TOKENS)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with torch.no_grad(), mock.patch.object(fused_softmax, "get_sliding_window_causal_mask", windowed_mask):
        return model(torch.tensor([TOKENS]), torch.arange(length)[None], mask)[0]


def save(model: GPTModel, args: Namespace, directory: Path, **how: object) -> None:
    state = {"model": model.sharded_state_dict(metadata=how), "args": args, "content_metadata": how}
    write_state(state, directory)


@pytest.mark.parametrize(
    ("name", "singleton"),
    long_except(
        [(name, index % 2 == 0) for index, name in enumerate(MODELS)], itertools.product(MODELS, (False, True))
    ),
)
def test_logits_are_upstreams(name: str, singleton: bool, tmp_path: Path) -> None:
    """MF-1: the logits of upstream's own model are computed from its own checkpoint."""
    model = upstream_model(name)
    save(model, arguments(name), tmp_path, singleton_local_shards=singleton)
    loaded, config = load_dist_checkpoint(tmp_path)
    assert config.hybrid_override_pattern == configured(name).hybrid_override_pattern
    theirs = their_logits(model)
    assert theirs.std() > 0.3
    torch.testing.assert_close(oracle.our_logits(loaded, TOKENS), theirs, atol=oracle.ATOL, rtol=oracle.RTOL)


def test_norms_of_their_own(tmp_path: Path) -> None:
    """Transformer Engine fuses the norm before an MLP into it, and keeps that before experts separate."""
    name = "sigmoid, shared experts, first layer dense"
    model = upstream_model(name)
    layer_with_experts = model.decoder.layers[1]  # all of them share one spec
    del layer_with_experts.submodules_config.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    save(model, arguments(name), tmp_path)
    keys = dist_checkpointing.load_tensors_metadata(str(tmp_path)).keys()
    assert {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.pre_mlp_layernorm.weight"} <= keys
    loaded, _ = load_dist_checkpoint(tmp_path)
    torch.testing.assert_close(
        oracle.our_logits(loaded, TOKENS), their_logits(model), atol=oracle.ATOL, rtol=oracle.RTOL
    )


LAYOUTS = {
    "TP 2 of layers, EP 2 of experts": sizes(tp=2, ep=2, etp=1),
    "TP 2": sizes(tp=2),
    "PP 2": sizes(pp=2),
    "EP 2": sizes(ep=2),
}


def logits_at(directories: list[Path], parallel: ParallelConfig) -> list[Tensor | None]:
    models = (layouts.load(directory, parallel) for directory in directories)
    return [layouts.logits(model, TOKENS) for model in models]


@pytest.mark.worlds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, tmp_path: Path) -> None:
    """MR-4: a checkpoint of one rank loads at every layout, with the logits of upstream's model on one rank."""
    parallel, directories, expected = LAYOUTS[layout], [], []
    names = [name for name in MODELS if name != GPT_OSS or parallel.expert_tensor_size == 1]
    for name in names:
        model = upstream_model(name)
        (tmp_path / name).mkdir()
        save(model, arguments(name), tmp_path / name)
        directories.append(tmp_path / name)
        expected.append(their_logits(model))
    ranks = run_ranks(logits_at, 2, directories, parallel)
    for index, theirs in enumerate(expected):
        computed = [rank[index] for rank in ranks if rank[index] is not None]
        assert computed
        for ours in computed:
            torch.testing.assert_close(ours, theirs, atol=oracle.ATOL, rtol=oracle.RTOL)
