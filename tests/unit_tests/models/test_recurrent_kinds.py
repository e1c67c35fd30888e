"""Kind of a model's recurrent layers: set by `--recurrent-layer` or by `--spec`, which must agree."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from megatron_ext.config import RECURRENT_KINDS, RECURRENT_LAYERS, ModelConfig
from megatron_ext.config.options import options_of
from megatron_ext.errors import ConfigError
from megatron_ext.models.build import OWN_SPECS, build_model, resolve_spec
from tests.unit_tests.models.conftest import TINY


def of_kind(kind: str, **fields: object) -> ModelConfig:
    return dataclasses.replace(TINY, recurrent_layer=kind, linear_num_key_heads=2, linear_num_value_heads=4, **fields)


@pytest.mark.parametrize("kind", RECURRENT_LAYERS)
def test_a_spec_of_the_same_kind_builds_the_same(kind: str) -> None:
    """M1-1: usable through `--spec`; the configuration's sizes reach the mixers."""
    models = [
        build_model(of_kind(kind, spec=spec), device=torch.device("cpu"), seed=1)
        for spec in (None, (OWN_SPECS, RECURRENT_KINDS[kind].stack_spec))
    ]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value is None or torch.equal(value, states[1][name]), name


@pytest.mark.parametrize(("kind", "other"), [*itertools.permutations(RECURRENT_LAYERS, 2)])
def test_two_kinds_are_refused_by_name(kind: str, other: str) -> None:
    with pytest.raises(ConfigError, match=f"is for --recurrent-layer {other}, and --recurrent-layer is {kind}; give"):
        resolve_spec(of_kind(kind, spec=(OWN_SPECS, RECURRENT_KINDS[other].stack_spec)))


def test_kinds_name_the_fields_that_shape_their_weights() -> None:
    """Every flag of a kind may contradict stored weights; what is compared is there to be compared."""
    compared = {name for kind in RECURRENT_KINDS.values() for name in kind.layout}
    assert compared <= TINY.resolved().keys()
    prefixes = ("mamba_", "linear_", "short_conv_")
    flags = {name for name, one in options_of(ModelConfig).items() if one.help_text and name.startswith(prefixes)}
    assert len(flags) > len(prefixes)
    assert flags <= compared
    assert tuple(RECURRENT_KINDS) == RECURRENT_LAYERS


def test_unknown_specs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--spec .*layer_specs lstm_stack_spec cannot be found"):
        resolve_spec(of_kind("mamba2", spec=(OWN_SPECS, "lstm_stack_spec")))
