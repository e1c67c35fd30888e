"""The gated delta net mixer beside megatron-core's own class, which computes with its deterministic fallback."""

from __future__ import annotations

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.ssm import gated_delta_net as upstream
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_ext.config import RECURRENT_KINDS
from megatron_ext.mcore.layer_specs import recurrent_layer_spec
from megatron_ext.mcore.versions import VERSION
from megatron_ext.mixers.gated_delta_net import GatedDeltaNetMixer
from megatron_ext.models.build import transformer_config
from tests.unit_tests.support.models import GATED_DELTA_NET
from tests.unit_tests.support.tensor_parallel import as_rank
from tests.unit_tests.support.upstream_delta_net import allow, without_kernels

HIDDEN, PREFIX = GATED_DELTA_NET.hidden_size, "decoder.layers.0.mixer."
SUBMODULES = recurrent_layer_spec(RECURRENT_KINDS["gated_delta_net"]).submodules.mixer.submodules


def config() -> TransformerConfig:
    return without_kernels(transformer_config(GATED_DELTA_NET, torch.float32))


def build(index: int = 0, ranks: int = 1, chunk_size: int = 64) -> GatedDeltaNetMixer:
    torch.manual_seed(3)
    settings = config()
    settings.perform_initialization = True
    with as_rank(index, ranks) as groups:
        mixer = GatedDeltaNetMixer(
            settings, SUBMODULES, HIDDEN, layer_number=1, pg_collection=groups, chunk_size=chunk_size
        )
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
        mixer.A_log.sub_(5.0)  # slow decay, else some heads give nearly nothing, and their norm magnifies rounding
    return mixer


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> upstream.GatedDeltaNet:
    """Upstream's module with our parameters."""
    allow(monkeypatch)
    with as_rank(0, 1) as groups:
        module = upstream.GatedDeltaNet(
            config(),
            upstream.GatedDeltaNetSubmodules(SUBMODULES.in_proj, SUBMODULES.out_norm, SUBMODULES.out_proj),
            layer_number=1,
            pg_collection=groups,
        )
    module.load_state_dict(build().state_dict(), strict=True)
    return module


def hidden(length: int, batch: int = 2) -> Tensor:
    return torch.randn(length, batch, HIDDEN, generator=torch.Generator().manual_seed(length))


def test_parameters_have_the_names_and_shapes_of_upstream(theirs: upstream.GatedDeltaNet) -> None:
    """LA-2: parameters have upstream's names and shapes, so its checkpoints load."""
    ours = {name: parameter.shape for name, parameter in build().named_parameters()}
    assert ours == {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert set(ours) == {
        "A_log", "dt_bias", "conv1d.weight", "in_proj.weight", "out_norm.weight", "out_proj.weight",
    }  # fmt: skip


@pytest.mark.parametrize("length", [1, 3, 64, 65, 150])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_training_forward_equals_upstream(theirs: upstream.GatedDeltaNet, length: int, chunk_size: int) -> None:
    """LA-2: outputs and gradients."""
    ours, x = build(chunk_size=chunk_size), hidden(length)
    gradients, outputs = [], []
    for module, arguments in ((ours, ()), (theirs, (None,))):
        module.train()
        output, bias = module(x, *arguments)
        assert bias is None
        outputs.append(output)
        loss = (output * torch.linspace(-1, 1, HIDDEN)).sum()
        gradients.append(torch.autograd.grad(loss, [p for _, p in sorted(module.named_parameters())]))
    assert outputs[0].std() > 0.1
    torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
    for mine, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight", "in_proj.weight", "out_norm.weight"])
def test_the_comparison_sees_every_parameter(theirs: upstream.GatedDeltaNet, name: str) -> None:
    """Negative control: a parameter whose first and last row change places."""
    ours, x = build(), hidden(65)
    with torch.no_grad():
        weight = ours.get_parameter(name)
        weight[[0, -1]] = weight[[-1, 0]]
    difference = (ours(x)[0] - theirs(x, None)[0]).abs().max()
    assert difference > 1e-2


@pytest.mark.parametrize(("index", "ranks"), [(0, 1), (1, 2)])
def test_same_shards_as_upstream(index: int, ranks: int) -> None:
    """Upstream's own method, called on our module: keys, places and contents in a distributed checkpoint."""
    mixer = build(index, ranks)
    mixer.tp_size, mixer.conv_bias, mixer.conv_dim_local_tp = ranks, False, mixer.conv_dim
    mixer.qk_dim, mixer.v_dim = mixer.qk_dim_local * ranks, mixer.v_dim_local * ranks
    mixer.num_value_heads = mixer.value_heads_local * ranks
    mixer.in_proj_dim = 2 * (mixer.qk_dim + mixer.v_dim + mixer.num_value_heads)
    if VERSION >= (0, 19):  # its constructor makes these names, which older versions compute here
        mixer.qk_dim_local_tp, mixer.v_dim_local_tp = qk, v = mixer.qk_dim_local, mixer.v_dim_local
        mixer.in_proj_split_names = ["query", "key", "value", "z", "beta", "alpha"]
        mixer.in_proj_split_sections = (qk, qk, v, v, mixer.value_heads_local, mixer.value_heads_local)
    with as_rank(index, ranks) as groups:
        mixer.pg_collection = groups
        theirs = shards(upstream.GatedDeltaNet.sharded_state_dict(mixer, prefix=PREFIX))
        ours = shards(mixer.sharded_state_dict(prefix=PREFIX))
    assert ours.keys() == theirs.keys()
    for key, shard in ours.items():
        assert torch.equal(shard.data, theirs[key].data), key
        assert shard.without_data() == theirs[key].without_data(), key


def shards(state: dict) -> dict[str, ShardedTensor]:
    """The global tensors that a state is written as, by key."""
    state = {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}
    apply_factories(state)
    return {shard.key: shard for shard in nested_values(state) if isinstance(shard, ShardedTensor)}
