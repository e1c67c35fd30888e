"""The Mamba-2 mixer in distributed checkpoints: what one tensor-parallel layout writes, another one reads."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from megatron_ext.config import RECURRENT_KINDS, ModelConfig
from megatron_ext.mcore.checkpoint.checkpoint_files import InProcessSave
from megatron_ext.mcore.layer_specs import recurrent_layer_spec
from megatron_ext.mixers.mamba2 import Mamba2Mixer
from megatron_ext.models.build import transformer_config
from tests.priority import TestPriority
from tests.unit_tests.support.tensor_parallel import as_rank

pytestmark = pytest.mark.priority(TestPriority.LOW)

# Every section has a size of its own, so that no two can be taken for each other.
HIDDEN, HEADS, HEAD, GROUPS, STATE, WINDOW = 16, 8, 5, 4, 3, 4
INNER, CHANNELS = HEADS * HEAD, GROUPS * STATE
XBC = (INNER, CHANNELS, CHANNELS)
ZXBC_DT = (INNER, *XBC, HEADS)
CONFIG = ModelConfig(
    hybrid_override_pattern="M",
    hidden_size=HIDDEN,
    mamba_num_heads=HEADS,
    mamba_head_dim=HEAD,
    mamba_num_groups=GROUPS,
    mamba_state_dim=STATE,
    vocab_size=8,
)
PREFIX = "decoder.layers.0.mixer."


def mixer_of_rank(index: int, ranks: int) -> Mamba2Mixer:
    with as_rank(index, ranks) as groups:
        return Mamba2Mixer(
            transformer_config(CONFIG, torch.float32),
            recurrent_layer_spec(RECURRENT_KINDS["mamba2"]).submodules.mixer.submodules,
            HIDDEN,
            layer_number=1,
            pg_collection=groups,
            d_conv=WINDOW,
        )


def sharded_state(mixer: Mamba2Mixer) -> dict:
    """Sharded state without `_extra_state` objects, which are empty, and of which one process can read one only."""
    with as_rank(mixer.tp_group.index, mixer.tp_group.ranks):
        state = mixer.sharded_state_dict(prefix=PREFIX)
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}


def shards(state: dict) -> dict[str, ShardedTensor]:
    """The global tensors that a state is written as, by key."""
    apply_factories(state)
    return {shard.key: shard for shard in nested_values(state) if isinstance(shard, ShardedTensor)}


def whole_parameters() -> dict[str, Tensor]:
    """Parameters of the mixer on one rank; every number differs from every other."""
    shapes = {
        "in_proj.weight": (sum(ZXBC_DT), HIDDEN),
        "conv1d.weight": (sum(XBC), 1, WINDOW),
        "conv1d.bias": (sum(XBC),),
        "A_log": (HEADS,),
        "dt_bias": (HEADS,),
        "D": (HEADS,),
        "norm.weight": (INNER,),
        "out_proj.weight": (HIDDEN, INNER),
    }
    numbers = torch.randperm(10_000, generator=torch.Generator().manual_seed(1)).float()
    parameters, start = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        parameters[name] = numbers[start : start + count].view(shape)
        start += count
    return parameters


def part(whole: Tensor, index: int, ranks: int, axis: int = 0) -> Tensor:
    return whole.chunk(ranks, dim=axis)[index]


def parts(whole: Tensor, sections: tuple[int, ...], index: int, ranks: int) -> Tensor:
    """A rank's share of each section, one below the other."""
    return torch.cat([part(section, index, ranks) for section in whole.split(sections)])


def parameters_of_rank(index: int, ranks: int) -> dict[str, Tensor]:
    """Parts of the whole parameters that rank `index` of `ranks` holds."""
    whole = whole_parameters()
    held = {name: part(whole[name], index, ranks) for name in ("A_log", "dt_bias", "D", "norm.weight")}
    held["in_proj.weight"] = parts(whole["in_proj.weight"], ZXBC_DT, index, ranks)
    held["conv1d.weight"] = parts(whole["conv1d.weight"], XBC, index, ranks)
    held["conv1d.bias"] = parts(whole["conv1d.bias"], XBC, index, ranks)
    held["out_proj.weight"] = part(whole["out_proj.weight"], index, ranks, axis=1)
    return held


def filled(mixer: Mamba2Mixer) -> Mamba2Mixer:
    mixer.load_state_dict(parameters_of_rank(mixer.tp_group.index, mixer.tp_group.ranks), strict=True)
    return mixer


def emptied(mixer: Mamba2Mixer) -> Mamba2Mixer:
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.fill_(torch.nan)
    return mixer


def save(ranks: int, directory: Path) -> Path:
    state = {str(index): sharded_state(filled(mixer_of_rank(index, ranks))) for index in range(ranks)}
    dist_checkpointing.save(state, str(directory), InProcessSave())
    return directory


def load(ranks: int, directory: Path) -> list[dict[str, Tensor]]:
    state = {str(index): sharded_state(emptied(mixer_of_rank(index, ranks))) for index in range(ranks)}
    loaded = dist_checkpointing.load(state, str(directory))
    return [{name.removeprefix(PREFIX): value for name, value in loaded[str(i)].items()} for i in range(ranks)]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_one_layout_reads_what_another_wrote(saved: int, loaded: int, tmp_path: Path) -> None:
    for index, state in enumerate(load(loaded, save(saved, tmp_path))):
        expected = parameters_of_rank(index, loaded)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def test_without_the_split_another_layout_reads_interleaved_rows(tmp_path: Path) -> None:
    """Negative control: split over the ranks as one tensor, the parts of the ranks end up in each other's place."""
    state = {}
    for index in range(2):
        with as_rank(index, 2) as groups:
            weight = parameters_of_rank(index, 2)["in_proj.weight"]
            state[str(index)] = make_tp_sharded_tensor_for_checkpoint(
                weight, "w", 0, tp_group=groups.tp, dp_cp_group=None
            )
    dist_checkpointing.save(state, str(tmp_path), InProcessSave())
    whole = whole_parameters()["in_proj.weight"]
    with as_rank(0, 1) as groups:
        target = make_tp_sharded_tensor_for_checkpoint(torch.empty_like(whole), "w", 0, tp_group=groups.tp)
    read = dist_checkpointing.load({"w": target}, str(tmp_path))["w"]
    assert read.shape == whole.shape
    assert not torch.equal(read, whole)


def test_keys_shapes_and_places() -> None:
    """Shapes and offsets of every tensor on rank 1 of 2 are those of megatron-core's `MambaMixer`."""
    found = shards(sharded_state(mixer_of_rank(1, 2)))
    assert {key.removeprefix(PREFIX): (shard.global_shape, shard.global_offset) for key, shard in found.items()} == {
        "A_log": ((8,), (4,)),
        "dt_bias": ((8,), (4,)),
        "D": ((8,), (4,)),
        "in_proj.weight.z": ((40, 16), (20, 0)),
        "in_proj.weight.x": ((40, 16), (20, 0)),
        "in_proj.weight.B": ((12, 16), (6, 0)),
        "in_proj.weight.C": ((12, 16), (6, 0)),
        "in_proj.weight.dt": ((8, 16), (4, 0)),
        "conv1d.weight.x": ((40, 1, 4), (20, 0, 0)),
        "conv1d.weight.B": ((12, 1, 4), (6, 0, 0)),
        "conv1d.weight.C": ((12, 1, 4), (6, 0, 0)),
        "conv1d.bias.x": ((40,), (20,)),
        "conv1d.bias.B": ((12,), (6,)),
        "conv1d.bias.C": ((12,), (6,)),
        "norm.weight": ((40,), (20,)),
        "out_proj.weight": ((16, 40), (0, 20)),
    }


@pytest.fixture
def upstream_mixer(monkeypatch: pytest.MonkeyPatch) -> type:
    """megatron-core's mixer class; its module imports Triton kernels, which we do not call."""
    kernels = types.ModuleType("tensor_ops")
    for name in ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"):
        setattr(kernels, name, None)
    path = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
    monkeypatch.setitem(sys.modules, path, kernels)
    monkeypatch.delitem(sys.modules, "megatron.core.ssm.mamba_mixer", raising=False)
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer").MambaMixer
    monkeypatch.delitem(sys.modules, "megatron.core.ssm.mamba_mixer")
    return mixer


@pytest.mark.parametrize(("index", "ranks"), [(0, 1), (1, 2), (3, 4)])
def test_same_shards_as_upstream(index: int, ranks: int, upstream_mixer: type) -> None:
    """Upstream's own method, called on our module. Not the gated norm, which upstream takes from `mamba_ssm`."""
    mixer = filled(mixer_of_rank(index, ranks))
    mixer.d_inner_local_tp, mixer.nheads_local_tp = mixer.d_inner_local, mixer.nheads_local
    mixer.ngroups_local_tp = mixer.ngroups_local
    with as_rank(index, ranks):
        theirs = shards(upstream_mixer.sharded_state_dict(mixer, prefix=PREFIX))
    ours = shards(sharded_state(mixer))
    assert ours.keys() == theirs.keys()
    del ours[f"{PREFIX}norm.weight"]
    for key, shard in ours.items():
        assert torch.equal(shard.data, theirs[key].data), key
        assert shard.without_data() == theirs[key].without_data(), key
