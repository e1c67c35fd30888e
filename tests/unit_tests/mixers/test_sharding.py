"""M1-1: recurrent mixers in distributed checkpoints: what one tensor-parallel layout writes, another one reads."""

from __future__ import annotations

import dataclasses
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
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.mcore.layer_specs import recurrent_layer_spec
from megatron_ext.mcore.versions import VERSION
from megatron_ext.mixers.mamba1 import Mamba1Mixer
from megatron_ext.mixers.mamba2 import Mamba2Mixer
from megatron_ext.mixers.mixer import RecurrentMixer
from megatron_ext.models.build import transformer_config
from tests.unit_tests.support.models import MAMBA1
from tests.unit_tests.support.tensor_parallel import as_rank

# Every section has a size of its own, so that no two can be taken for each other.
HIDDEN, HEADS, HEAD, GROUPS, STATE, WINDOW, RANK = 16, 8, 5, 4, 3, 4, 6
INNER, CHANNELS = HEADS * HEAD, GROUPS * STATE
XBC = (INNER, CHANNELS, CHANNELS)
ZXBC_DT = (INNER, *XBC, HEADS)
CONFIGS = {
    "mamba2": ModelConfig(
        hybrid_override_pattern="M",
        hidden_size=HIDDEN,
        mamba_num_heads=HEADS,
        mamba_head_dim=HEAD,
        mamba_num_groups=GROUPS,
        mamba_state_dim=STATE,
        vocab_size=8,
    ),
    "mamba1": dataclasses.replace(MAMBA1, hidden_size=HIDDEN, mamba_state_dim=STATE),
}
MIXERS = {"mamba2": Mamba2Mixer, "mamba1": Mamba1Mixer}
FIELDS = {
    "mamba2": {"d_conv": WINDOW},
    "mamba1": {"d_inner": INNER, "dt_rank": RANK, "d_conv": WINDOW, "inner_norm": "weighted"},
}
# Sections of a parameter that are split one by one, axes that are not the first, and parameters that all ranks hold.
SECTIONS = {
    "mamba2": {"in_proj.weight": ZXBC_DT, "conv1d.weight": XBC, "conv1d.bias": XBC},
    "mamba1": {"in_proj.weight": (INNER, INNER)},
}
SPLIT_AXIS = {"x_proj.weight": 1, "out_proj.weight": 1}
WHOLE = {"dt_layernorm.weight", "b_layernorm.weight", "c_layernorm.weight"}
PREFIX = "decoder.layers.0.mixer."


def mixer_of_rank(kind: str, index: int, ranks: int, **fields: object) -> RecurrentMixer:
    with as_rank(index, ranks) as groups:
        return MIXERS[kind](
            transformer_config(CONFIGS[kind], torch.float32),
            recurrent_layer_spec(RECURRENT_KINDS[kind]).submodules.mixer.submodules,
            HIDDEN,
            layer_number=1,
            pg_collection=groups,
            **FIELDS[kind] | fields,
        )


def sharded_state(mixer: RecurrentMixer) -> dict:
    """Sharded state without `_extra_state` objects, which are empty, and of which one process can read one only."""
    with as_rank(mixer.tp_group.index, mixer.tp_group.ranks):
        state = mixer.sharded_state_dict(prefix=PREFIX)
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}


def shards(state: dict) -> dict[str, ShardedTensor]:
    """The global tensors that a state is written as, by key."""
    apply_factories(state)
    return {shard.key: shard for shard in nested_values(state) if isinstance(shard, ShardedTensor)}


def whole_parameters(kind: str) -> dict[str, Tensor]:
    """Parameters of the mixer on one rank; every number differs from every other."""
    numbers = torch.randperm(20_000, generator=torch.Generator().manual_seed(1)).float()
    parameters, start = {}, 0
    for name, parameter in mixer_of_rank(kind, 0, 1).named_parameters():
        parameters[name] = numbers[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return parameters


def parameters_of_rank(kind: str, index: int, ranks: int) -> dict[str, Tensor]:
    """Parts of the whole parameters that rank `index` of `ranks` holds: its share of each section."""
    held = {}
    for name, whole in whole_parameters(kind).items():
        axis = SPLIT_AXIS.get(name, 0)
        sections = whole.split(SECTIONS[kind].get(name, whole.shape[axis]), dim=axis)
        held[name] = whole if name in WHOLE else torch.cat([one.chunk(ranks, axis)[index] for one in sections], axis)
    return held


def filled(kind: str, mixer: RecurrentMixer) -> RecurrentMixer:
    mixer.load_state_dict(parameters_of_rank(kind, mixer.tp_group.index, mixer.tp_group.ranks), strict=True)
    return mixer


def save(kind: str, ranks: int, directory: Path) -> Path:
    state = {str(index): sharded_state(filled(kind, mixer_of_rank(kind, index, ranks))) for index in range(ranks)}
    write_state(state, directory)
    return directory


def load(kind: str, ranks: int, directory: Path) -> list[dict[str, Tensor]]:
    mixers = [mixer_of_rank(kind, index, ranks) for index in range(ranks)]
    with torch.no_grad():
        for mixer in mixers:
            for parameter in mixer.parameters():
                parameter.fill_(torch.nan)
    loaded = dist_checkpointing.load({str(i): sharded_state(mixer) for i, mixer in enumerate(mixers)}, str(directory))
    return [{name.removeprefix(PREFIX): value for name, value in loaded[str(i)].items()} for i in range(ranks)]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", MIXERS)
def test_one_layout_reads_what_another_wrote(kind: str, saved: int, loaded: int, tmp_path: Path) -> None:
    for index, state in enumerate(load(kind, loaded, save(kind, saved, tmp_path))):
        expected = parameters_of_rank(kind, index, loaded)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


def test_without_the_split_another_layout_reads_interleaved_rows(tmp_path: Path) -> None:
    """Negative control: split over the ranks as one tensor, the parts of the ranks end up in each other's place."""
    state = {}
    for index in range(2):
        weight = parameters_of_rank("mamba2", index, 2)["in_proj.weight"]
        with as_rank(index, 2) as groups:
            state[str(index)] = make_tp_sharded_tensor_for_checkpoint(
                weight, "w", 0, tp_group=groups.tp, dp_cp_group=None
            )
    write_state(state, tmp_path)
    whole = whole_parameters("mamba2")["in_proj.weight"]
    with as_rank(0, 1) as groups:
        target = make_tp_sharded_tensor_for_checkpoint(torch.empty_like(whole), "w", 0, tp_group=groups.tp)
    read = dist_checkpointing.load({"w": target}, str(tmp_path))["w"]
    assert read.shape == whole.shape
    assert not torch.equal(read, whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_multipliers_of_a_projection_are_those_of_its_parts(ranks: int) -> None:
    """FA-1: a factor each of z, x, B, C and dt, whatever a rank has of them."""
    factors, sizes = (2.0, 3.0, 4.0, 5.0, 6.0), [size // ranks for size in ZXBC_DT]
    mixer = mixer_of_rank("mamba2", ranks - 1, ranks, multipliers=factors)
    conv_inputs, (dt,), z = mixer.split(torch.ones(sum(sizes)))
    parts = torch.cat([z, conv_inputs, dt]).split(sizes)
    assert [one.unique().tolist() for one in parts] == [[factor] for factor in factors]


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
    mixer = filled("mamba2", mixer_of_rank("mamba2", index, ranks))
    mixer.d_inner_local_tp, mixer.nheads_local_tp = mixer.d_inner_local, mixer.nheads_local
    mixer.ngroups_local_tp = mixer.ngroups_local
    ours = shards(sharded_state(mixer))
    if VERSION >= (0, 19):  # the mixer itself has these parameters there; their keys in checkpoints are the same
        mixer.conv1d_weight, mixer.conv1d_bias = mixer.conv1d.weight, mixer.conv1d.bias
        del mixer.conv1d
    with as_rank(index, ranks):
        theirs = shards(upstream_mixer.sharded_state_dict(mixer, prefix=PREFIX))
    assert ours.keys() == theirs.keys()
    del ours[f"{PREFIX}norm.weight"]
    for key, shard in ours.items():
        assert torch.equal(shard.data, theirs[key].data), key
        assert shard.without_data() == theirs[key].without_data(), key
