"""SP-8, SP-9: layers of multi-token prediction in Megatron's checkpoints, and megatron-core's own forward of them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import inference_layers
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.versions import VERSION
from megatron_ext.models.build import build_model, resolve_spec, transformer_config
from megatron_ext.models.load import load_model, save_model
from megatron_ext.models.megatron.training_args import config_from_args
from megatron_ext.models.size import matrix_parameter_count
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support.prediction import prediction_logits

CPU = torch.device("cpu")
NULL = {"tokenizer_type": "NullTokenizer"}
TOKENS = torch.tensor([oracle.prompt(24, seed=0, vocab_size=50), oracle.prompt(24, seed=1, vocab_size=50)])
DEPTHS = 2
HAS_REPEATED = VERSION >= (0, 17)
# Fields over those of a small GPT, arguments of the run, whether one layer serves all depths.
GPTS = {
    "tied": ({}, {}, False),
    "untied, SwiGLU, LayerNorm": (
        {"untie_embeddings_and_output_weights": True, "swiglu": True, "normalization": "LayerNorm"},
        {},
        False,
    ),
    "one layer for all depths": ({"swiglu": True}, {}, True),
    "experts": (
        {
            "hybrid_override_pattern": "*-*E*E",
            "num_experts": 4,
            "moe_ffn_hidden_size": 24,
            "moe_router_score_function": "sigmoid",
            "moe_shared_expert_intermediate_size": 16,
        },
        {"moe_layer_freq": [0, 1, 1]},
        False,
    ),
}


@pytest.fixture(autouse=True)
def classes_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main's block asks whether its layer is of these classes, which are none without Transformer Engine."""
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        if not isinstance(getattr(inference_layers, name, None), type):
            monkeypatch.setattr(inference_layers, name, (), raising=False)


def configured(name: str) -> ModelConfig:
    return dataclasses.replace(megatron_lm.GPT, **GPTS[name][0])


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * parameter[0].numel() ** -0.5 * (3 if "embedding" in name else 1))
            else:
                parameter.copy_(0.3 * drawn + ("norm" in name))
    for router in (one for one in model.modules() if type(one) is TopKRouter):  # whose product needs CUDA
        router.gating = lambda hidden, router=router: F.linear(hidden, router.weight, router.bias)
    return model.eval()


def upstream_gpt(name: str) -> GPTModel:
    """Upstream's GPT with its own block of multi-token prediction."""
    platform.initialize()
    config, (_, run, repeated) = configured(name), GPTS[name]
    settings = dataclasses.replace(
        transformer_config(config, torch.float32), num_layers=config.layer_count // 2, mtp_num_layers=DEPTHS, **run
    )
    if repeated:
        settings.mtp_use_repeated_layer = True
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=False, normalization=config.normalization)
    model = GPTModel(
        settings,
        spec,
        config.vocab_size,
        config.max_position_embeddings,
        position_embedding_type=config.position_embedding_type,
        share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
        mtp_block_spec=get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False),
    )
    return randomized(model)


def upstream_logits(model: nn.Module) -> list[Tensor]:
    """Logits of each depth by upstream's block, without its last positions, whose tokens are made up."""
    seen: list[Tensor] = []
    hook = model.mtp.register_forward_hook(lambda _, __, states: seen.append(states))
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    mask = torch.ones(1, 1, TOKENS.shape[1], TOKENS.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        model(TOKENS, positions, mask, labels=TOKENS)
        hook.remove()
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        states = seen[0].chunk(1 + DEPTHS)[1:]
        return [F.linear(one, weight).transpose(0, 1)[:, :-depth] for depth, one in enumerate(states, 1)]


def saved(model: nn.Module, args: object, folder: Path) -> Path:
    """The checkpoint that Megatron-LM would leave."""
    iteration = folder / "run" / "iter_0000100"
    iteration.mkdir(parents=True)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 100}
    write_state({**common, "model": model.sharded_state_dict()}, iteration)
    (folder / "run" / "latest_checkpointed_iteration.txt").write_text("100")
    return folder / "run"


def gpt_arguments(name: str) -> object:
    config, (_, run, repeated) = configured(name), GPTS[name]
    fields = {field: value for field, value in config.to_dict().items() if field.startswith("moe_")}
    fields |= {"num_experts": config.num_experts, "mtp_num_layers": DEPTHS, "mtp_use_repeated_layer": repeated}
    return megatron_lm.gpt_arguments(config, **(fields | run))


def read(directory: Path, depths: int = DEPTHS) -> HybridModel:
    return load_model(SourceConfig(load=str(directory), **NULL), {"mtp_num_layers": depths}, device=CPU).model


def assert_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        assert oracle.largest_excess(one, other) <= 1


@pytest.mark.base
@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_predicts_what_upstream_s_block_does(name, tmp_path):
    """SP-8, SP-9: from upstream's own files; the forward of inference and of training."""
    if GPTS[name][2] and not HAS_REPEATED:
        pytest.skip(f"megatron-core {VERSION} has no repeated layer")
    theirs = upstream_gpt(name)
    directory = saved(theirs, gpt_arguments(name), tmp_path)
    ours, expected = read(directory), upstream_logits(theirs)
    assert len(ours.mtp.layers) == (1 if GPTS[name][2] else DEPTHS)
    with torch.inference_mode():
        assert_equal(prediction_logits(ours, TOKENS, DEPTHS), expected)
    with torch.no_grad():
        assert_equal(prediction_logits(ours, TOKENS, DEPTHS), expected)
        ours.mtp.layers[0].eh_proj.weight.copy_(ours.mtp.layers[0].eh_proj.weight.roll(32, dims=1))
        swapped = prediction_logits(ours, TOKENS, DEPTHS)
    assert min(oracle.largest_excess(one, two) for one, two in zip(swapped, expected, strict=True)) > 1


HYBRID = ModelConfig(
    hybrid_override_pattern="M*-E",
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    mamba_state_dim=16,
    mamba_head_dim=8,
    mamba_num_groups=2,
    num_experts=4,
    moe_ffn_hidden_size=24,
    vocab_size=50,
    untie_embeddings_and_output_weights=True,
    mtp_num_layers=DEPTHS,
    mtp_hybrid_override_pattern="*E",
)
WITHOUT = {"num_experts": None, "mtp_num_layers": None, "mtp_hybrid_override_pattern": None}


@pytest.mark.base
@pytest.mark.skipif(VERSION < (0, 18), reason="upstream's hybrid model has no multi-token prediction")
@pytest.mark.parametrize(("pattern", "repeated"), [("*E", False), ("M*-", False), ("*-", True)])
def test_a_hybrid_predicts_what_upstream_s_block_does(pattern, repeated, tmp_path):
    """SP-8, SP-9: upstream's model and block, of our layers, since its own need Transformer Engine."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel as Upstream
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ext.mcore.layers.linear import ColumnLinear
    from megatron_ext.mcore.layers.norms import LayerNormFromConfig

    config = dataclasses.replace(HYBRID, mtp_hybrid_override_pattern=pattern, mtp_use_repeated_layer=repeated)
    parts = dict.fromkeys(("enorm", "hnorm", "layer_norm"), LayerNormFromConfig)
    layer = MultiTokenPredictionLayerSubmodules(**parts, eh_proj=ColumnLinear, mtp_model_layer=None)
    block = MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=layer)])
    spec = resolve_spec(config)
    spec.submodules.mtp_block_spec = ModuleSpec(MultiTokenPredictionBlock, submodules=block)
    settings = transformer_config(config, torch.float32)
    settings.mtp_num_layers, settings.mtp_use_repeated_layer = DEPTHS, repeated
    platform.initialize()
    whole = "/".join([config.hybrid_override_pattern, *[pattern] * DEPTHS])
    theirs = Upstream(
        settings,
        spec,
        vocab_size=50,
        max_sequence_length=64,
        hybrid_layer_pattern=whole,
        share_embeddings_and_output_weights=False,
    )
    theirs = randomized(theirs)
    args = megatron_lm.arguments(
        config,
        hybrid_override_pattern=None,
        hybrid_layer_pattern=whole,
        num_layers=4,
        num_experts=4,
        moe_ffn_hidden_size=24,
        mtp_num_layers=DEPTHS,
        mtp_use_repeated_layer=repeated,
    )
    directory = saved(theirs, args, tmp_path)
    with torch.inference_mode():
        ours = prediction_logits(read(directory), TOKENS, DEPTHS)
    assert_equal(ours, upstream_logits(theirs))


def as_in_a_gpt(name: str) -> str:
    """Key of a tensor of ours in the checkpoint of a GPT with separate norms."""
    return re.sub(r"mtp_model_layer\.layers\.\d\.", "transformer_layer.", f"mtp.{name}")


def test_what_save_keeps(tmp_path):
    """SP-8: `--save` writes them as it read them; without it, and without a flag, they are not read."""
    config = dataclasses.replace(megatron_lm.GPT, mtp_num_layers=1)
    model, args = randomized(build_model(config, device=CPU)), megatron_lm.gpt_arguments(config, mtp_num_layers=1)
    tensors = {name: one.detach() for name, one in megatron_lm.gpt_model(megatron_lm.GPT).named_parameters()}
    tensors |= {as_in_a_gpt(name): one.detach() for name, one in model.mtp.named_parameters()}
    directory, target = megatron_lm.write(tmp_path / "run", tensors, args), str(tmp_path / "saved")
    save_model(target, load_model(SourceConfig(load=str(directory), save=target, **NULL), {}, device=CPU))
    again = load_model(SourceConfig(load=target, save=str(tmp_path / "more"), **NULL), {}, device=CPU)
    found, expected = model_tensors(again.model), model_tensors(model)
    assert found.keys() == expected.keys()
    for name in (name for name in expected if name.startswith("mtp.")):
        assert torch.equal(found[name], expected[name]), name
    for place in (directory, target):
        assert load_model(SourceConfig(load=str(place), **NULL), {}, device=CPU).model.mtp is None
    for flags, message in (
        ({"mtp_num_layers": 2}, "--mtp-num-layers 2 contradicts .*, whose weights are for 1"),
        ({"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*"}, "--mtp-hybrid-override-pattern"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_model(SourceConfig(load=target, **NULL), flags, device=CPU)


def test_a_tensor_that_is_missing(tmp_path):
    """SP-8: by name; a model without these layers does not need it."""
    config = dataclasses.replace(megatron_lm.GPT, mtp_num_layers=1)
    model = build_model(config, device=CPU)
    tensors = {name: one.detach() for name, one in megatron_lm.gpt_model(megatron_lm.GPT).named_parameters()}
    tensors |= {as_in_a_gpt(name): one.detach() for name, one in model.mtp.named_parameters() if "hnorm" not in name}
    args = megatron_lm.gpt_arguments(config, mtp_num_layers=1)
    directory = megatron_lm.write(tmp_path / "run", tensors, args)
    assert load_model(SourceConfig(load=str(directory), **NULL), {}, device=CPU).model.mtp is None
    with pytest.raises(CheckpointError, match=r"lacks mtp\.layers\.0\.hnorm\.weight"):
        read(directory, depths=1)


def test_their_size_is_known_before():
    """SP-8: a projection and the layers for each depth that has weights of its own."""
    for repeated, layers in ((False, DEPTHS), (True, 1)):
        config = dataclasses.replace(HYBRID, mtp_use_repeated_layer=repeated)
        matrices = (one for one in build_model(config, device=CPU).parameters() if one.dim() > 1)
        assert config.mtp_layer_count == layers
        assert matrix_parameter_count(config) == sum(one.numel() for one in matrices)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mtp_num_layers": 2}, ("*-", 2, False)),
        ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, ("*-", 2, True)),
        ({"mtp_num_layers": 0}, ("", None, False)),
        ({"mtp_num_layers": 1, "window_size": (7, 0)}, ("", None, False)),
    ],
    ids=str,
)
def test_arguments_of_a_gpt(changes, expected):
    """SP-8: a layer of Megatron's with a window is left unread."""
    args = megatron_lm.gpt_arguments(megatron_lm.GPT, **changes)
    config = config_from_args(args, "there", is_gpt=True)
    assert (config.mtp_pattern, config.mtp_num_layers, config.mtp_use_repeated_layer) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hybrid_override_pattern": "M*-/*-/*-"}, ("*-", 2)),
        ({"hybrid_override_pattern": "M*-", "mtp_num_layers": 2, "mtp_hybrid_override_pattern": "*"}, ("*", 2)),
        ({"hybrid_override_pattern": "G*-/G*", "mtp_num_layers": 1}, ("M*", 1)),
        ({"hybrid_override_pattern": "M*-", "mtp_num_layers": 1}, ("", None)),
    ],
    ids=str,
)
def test_arguments_of_a_hybrid(changes, expected):
    """SP-8: in the pattern, or beside it."""
    args = megatron_lm.arguments(dataclasses.replace(HYBRID, **WITHOUT, hybrid_override_pattern="M*-"), **changes)
    config = config_from_args(args, "there", is_gpt=False)
    assert (config.mtp_pattern, config.mtp_num_layers) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mtp_use_repeated_layer": True}, "need --mtp-num-layers"),
        ({"hybrid_override_pattern": "M*-", "mtp_num_layers": 1}, "needs --mtp-hybrid-override-pattern"),
        ({"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*P"}, "has the letter 'P'; supported are M, "),
        ({"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "M*"}, "has recurrent layers, and '.*' has none"),
        ({"mtp_num_layers": 33}, "66 layers of multi-token prediction are too many; there must be at most 64"),
        ({"mtp_num_layers": 0}, "--mtp-num-layers 0 must be positive"),
        ({"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*E"}, "which need --num-experts"),
    ],
    ids=str,
)
def test_fields_that_contradict_each_other(fields, message):
    """SP-8: before anything is built."""
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(megatron_lm.GPT, **fields)
