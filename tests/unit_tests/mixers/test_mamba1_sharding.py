"""M1-1: Mamba-1 layers in distributed checkpoints: layouts read each other, and a model comes back whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor

from megatron_ext.config import RECURRENT_KINDS, SourceConfig
from megatron_ext.mcore.checkpoint.checkpoint_files import InProcessSave
from megatron_ext.mcore.layer_specs import recurrent_layer_spec
from megatron_ext.mixers.mamba1 import Mamba1Mixer
from megatron_ext.models.build import build_model, transformer_config
from megatron_ext.models.load import LoadedModel, load_model, save_model
from megatron_ext.text.tokenizer import NullTokenizer
from tests.priority import TestPriority
from tests.unit_tests.support.models import MAMBA1
from tests.unit_tests.support.tensor_parallel import as_rank

pytestmark = pytest.mark.priority(TestPriority.LOW)

# Every size is another one, so that none can be taken for another.
HIDDEN, CHANNELS, RANK, STATE, WINDOW = 16, 40, 6, 3, 4
CONFIG = dataclasses.replace(MAMBA1, hidden_size=HIDDEN, mamba_state_dim=STATE)
PREFIX = "decoder.layers.0.mixer."
SPLIT_AXIS = {"x_proj.weight": 1, "out_proj.weight": 1}
WHOLE = {"dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight"}


def mixer_of_rank(index: int, ranks: int) -> Mamba1Mixer:
    with as_rank(index, ranks) as groups:
        return Mamba1Mixer(
            transformer_config(CONFIG, torch.float32),
            recurrent_layer_spec(RECURRENT_KINDS["mamba1"]).submodules.mixer.submodules,
            HIDDEN,
            layer_number=1,
            pg_collection=groups,
            d_inner=CHANNELS,
            dt_rank=RANK,
            d_conv=WINDOW,
            inner_norm="weighted",
        )


def sharded_state(mixer: Mamba1Mixer) -> dict:
    with as_rank(mixer.tp_group.index, mixer.tp_group.ranks):
        state = mixer.sharded_state_dict(prefix=PREFIX)
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}


def whole_parameters() -> dict[str, Tensor]:
    """Parameters on one rank; all values are distinct."""
    numbers = torch.randperm(20_000, generator=torch.Generator().manual_seed(1)).float()
    parameters, start = {}, 0
    for name, parameter in mixer_of_rank(0, 1).named_parameters():
        parameters[name] = numbers[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return parameters


def parameters_of_rank(index: int, ranks: int) -> dict[str, Tensor]:
    """Parts of the whole parameters that rank `index` of `ranks` holds."""
    held = {}
    for name, whole in whole_parameters().items():
        if name == "in_proj.weight":
            held[name] = torch.cat([half.chunk(ranks)[index] for half in whole.chunk(2)])  # x, z
        else:
            held[name] = whole if name in WHOLE else whole.chunk(ranks, dim=SPLIT_AXIS.get(name, 0))[index]
    return held


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (1, 2), (2, 1), (4, 2)])
def test_one_layout_reads_what_another_wrote(saved: int, loaded: int, tmp_path: Path) -> None:
    written, read = {}, {}
    for index in range(saved):
        mixer = mixer_of_rank(index, saved)
        mixer.load_state_dict(parameters_of_rank(index, saved), strict=True)
        written[str(index)] = sharded_state(mixer)
    dist_checkpointing.save(written, str(tmp_path), InProcessSave())
    for index in range(loaded):
        mixer = mixer_of_rank(index, loaded)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.fill_(torch.nan)
        read[str(index)] = sharded_state(mixer)
    for index, state in dist_checkpointing.load(read, str(tmp_path)).items():
        expected = parameters_of_rank(int(index), loaded)
        assert {name.removeprefix(PREFIX) for name in state} == set(expected)
        for name, value in expected.items():
            assert torch.equal(state[PREFIX + name], value), name


def test_keys_shapes_and_places() -> None:
    """Global shape and offset of every tensor are right on rank 1 of 2."""
    state = sharded_state(mixer_of_rank(1, 2))
    apply_factories(state)
    found = [shard for shard in nested_values(state) if isinstance(shard, ShardedTensor)]
    assert {shard.key.removeprefix(PREFIX): (shard.global_shape, shard.global_offset) for shard in found} == {
        "in_proj.weight.x": ((40, 16), (20, 0)),
        "in_proj.weight.z": ((40, 16), (20, 0)),
        "conv1d.weight": ((40, 1, 4), (20, 0, 0)),
        "conv1d.bias": ((40,), (20,)),
        "x_proj.weight": ((12, 40), (0, 20)),
        "dt_proj.weight": ((40, 6), (20, 0)),
        "dt_proj.bias": ((40,), (20,)),
        "A_log": ((40, 3), (20, 0)),
        "D": ((40,), (20,)),
        "dt_layernorm.weight": ((6,), (0,)),
        "b_layernorm.weight": ((3,), (0,)),
        "c_layernorm.weight": ((3,), (0,)),
        "out_proj.weight": ((16, 40), (0, 20)),
    }


@pytest.mark.parametrize("inner_norm", ["none", "plain", "weighted"])
def test_a_saved_model_comes_back(inner_norm: str, tmp_path: Path) -> None:
    """`--save`, then `--load`: configuration and every weight."""
    config = dataclasses.replace(MAMBA1, mamba_inner_norm=inner_norm)
    model = build_model(config, device=torch.device("cpu"), seed=3)
    tokenizer = NullTokenizer(config.vocab_size)
    save_model(tmp_path / "saved", LoadedModel(model, config, tokenizer, torch.float32, "test"))
    loaded = load_model(SourceConfig(load=str(tmp_path / "saved")), {}, device=torch.device("cpu"))
    assert loaded.config == config
    for name, value in model.state_dict().items():
        assert value is None or torch.equal(value, loaded.model.state_dict()[name]), name
