"""CU-7: Transformer Engine's layers in place of ours, checked without it: by parts that have what its parts have."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.mcore.layers import transformer_engine
from megatron_ext.mcore.layers.linear import ColumnLinear, RowLinear
from megatron_ext.mcore.layers.mlp import PlainMLP
from megatron_ext.mcore.layers.norms import PlainRMSNorm
from megatron_ext.models.build import build_model
from megatron_ext.models.megatron.dist_checkpoint import load_dist_weights, save_dist_checkpoint
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.support.models import GATED_DELTA_NET, HYBRID

CPU = torch.device("cpu")
KINDS = {"mamba2": HYBRID, "gated_delta_net": GATED_DELTA_NET}


class _Scales:
    """Stand-in for Transformer Engine's modules, which report a state beside their parameters."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raise AssertionError("scales of 8-bit training are not read")


class StandInColumn(_Scales, ColumnParallelLinear):
    def __init__(self, *args: object, gather_output: bool, **options: object) -> None:
        assert not gather_output, "Transformer Engine's layers gather nothing"
        super().__init__(*args, gather_output=False, **options)


class StandInRow(_Scales, RowParallelLinear):
    pass


class StandInNorm(_Scales, nn.RMSNorm):
    def __init__(self, config: object, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


PARTS = transformer_engine.parts_of(StandInColumn, StandInRow, StandInNorm)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "installed_parts", lambda: PARTS)


def built(config: ModelConfig, implementation: str, seed: int = 5) -> nn.Module:
    return build_model(config, device=CPU, seed=seed, transformer_impl=implementation)


def classes(model: nn.Module) -> set[type]:
    return {type(module) for module in model.decoder.layers.modules()}


def logits(model: nn.Module) -> Tensor:
    return oracle.our_logits(model, oracle.prompt(24, seed=0, vocab_size=50))


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS.keys())
class TestParts:
    def test_they_stand_everywhere_and_compute_the_same(self, installed, config):
        theirs, ours = built(config, "transformer_engine"), built(config, "local")
        assert {StandInColumn, StandInRow, StandInNorm} <= classes(theirs)
        assert not classes(theirs) & {ColumnLinear, RowLinear, PlainMLP}
        assert {ColumnLinear, RowLinear, PlainRMSNorm} <= classes(ours)
        assert dict(theirs.named_parameters()).keys() == dict(ours.named_parameters()).keys()
        assert torch.equal(logits(theirs), logits(ours))

    @pytest.mark.parametrize("way", ["theirs to ours", "ours to theirs"])
    def test_checkpoints_of_either_load_in_the_other(self, installed, config, tmp_path: Path, way: str):
        """Each is asked for what the other has saved under its keys, and neither for scales."""
        names = ["transformer_engine", "local"] if way == "theirs to ours" else ["local", "transformer_engine"]
        source, target = built(config, names[0], seed=1), built(config, names[1], seed=2)
        assert not torch.equal(logits(source), logits(target))
        save_dist_checkpoint(tmp_path / "saved", source, config)
        load_dist_weights(target, tmp_path / "saved")
        assert torch.equal(logits(source), logits(target))


def test_a_part_that_is_not_replaced_is_missed(installed, monkeypatch: pytest.MonkeyPatch):
    """The control: with a part less, local classes are left."""
    fewer = {ours: theirs for ours, theirs in PARTS.items() if ours is not RowLinear}
    monkeypatch.setattr(transformer_engine, "installed_parts", lambda: fewer)
    assert RowLinear in classes(built(HYBRID, "transformer_engine"))


def test_where_it_cannot_be_used_that_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformer_engine, "installed_parts", lambda: None)
    with caplog.at_level(logging.WARNING):
        model = built(HYBRID, "transformer_engine")
    assert "Transformer Engine cannot be used here" in caplog.text
    assert ColumnLinear in classes(model)
