"""Experts in fixed shapes: what routing decides is in numbers only, and the plain layer gives the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.mcore.layers import dense_moe
from megatron_ext.mcore.layers.dense_moe import fixed_shapes, has_fixed_shapes, stacked
from tests.unit_tests.mcore.layers.test_moe import (
    LAYER_CONTROLS,
    LAYERS,
    LEAST_MARGIN,
    make_hidden,
    make_layer,
    run_layer,
)
from tests.unit_tests.support.moe import reference_moe, routing_margin
from tests.unit_tests.support.programs import ProgramRecorder, differences

WAYS = {"all": 0, "picked": 1e-9, "by shapes": dense_moe._PICKED_BELOW}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Computation of the experts, forced whatever the shapes are."""
    monkeypatch.setattr(dense_moe, "_PICKED_BELOW", WAYS[request.param] or 1e9)
    return request.param


def run_fixed(layer: nn.Module, hidden: Tensor) -> Tensor:
    with torch.inference_mode(), fixed_shapes():
        return run_layer(layer, hidden)


@pytest.mark.parametrize("name", LAYERS)
def test_equals_reference(name: str, way: str) -> None:
    """CU-5: every kind of routing, experts and activation, to the plain layer's tolerance; NaN stays in its own row."""
    config = LAYERS[name]
    layer, hidden = make_layer(config), make_hidden(config, 7, 2)
    assert routing_margin(layer, hidden.flatten(0, 1), config) > LEAST_MARGIN
    expected = reference_moe(layer, hidden.flatten(0, 1), config).float()
    torch.testing.assert_close(run_fixed(layer, hidden), expected, atol=1e-5, rtol=1e-5)
    assert not has_fixed_shapes()
    hidden[5:] = torch.nan
    torch.testing.assert_close(run_fixed(layer, hidden)[:10], expected[:10], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_plain_layer(dtype: torch.dtype, way: str) -> None:
    """CU-5: fp32 to 1e-5; bf16 to two roundings of it, since sums over experts are rounded once and not each time."""
    config = LAYERS["groups"]
    layer, hidden = make_layer(config, dtype=dtype), make_hidden(config, 9, 1).to(dtype)
    with torch.inference_mode():
        expected = run_layer(layer, hidden)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(run_fixed(layer, hidden), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("control", LAYER_CONTROLS)
def test_comparison_finds_planted_errors(control: str) -> None:
    """Negative controls."""
    config = LAYERS["groups"]
    layer, hidden = make_layer(config), make_hidden(config)
    expected = run_fixed(layer, hidden)
    with torch.no_grad():
        LAYER_CONTROLS[control](layer)
    assert (run_fixed(layer, hidden) - expected).abs().max() > 1e-2


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts run one after the other if all results together would need too much memory."""
    config = LAYERS["groups"]
    layer, hidden = make_layer(config), make_hidden(config)
    whole = run_fixed(layer, hidden)
    monkeypatch.setattr(dense_moe, "_BYTES", 1)
    torch.testing.assert_close(run_fixed(layer, hidden), whole, atol=1e-6, rtol=1e-6)


def test_two_routings_are_the_same_program(way: str) -> None:
    """CU-4, CU-5: nothing is read back, whatever the routing; the plain layer is the negative control."""
    config, programs = LAYERS["groups"], []
    layer = make_layer(config)
    place = torch.zeros(5, 1, config.hidden_size)
    run_fixed(layer, place)
    for length in (5, 6):
        place.copy_(make_hidden(config, length, 1)[:5])
        for run in (run_fixed, run_layer):
            programs.append(ProgramRecorder())
            with torch.inference_mode(), programs[-1]:
                run(layer, place)
    fixed, plain, other_fixed, other_plain = programs
    assert not differences(fixed, other_fixed)
    assert not fixed.unfit
    assert differences(plain, other_plain)
    assert plain.unfit


def test_contiguous_weights_stay_parameters() -> None:
    """Parameters keep identity, values and gradients; in-place writes are seen, a replacement repeats the layout."""
    weights = [nn.Parameter(torch.full((2, 3), float(i))) for i in range(3)]
    with torch.inference_mode():
        whole = stacked(weights)
        again = stacked(weights)
    assert again.data_ptr() == whole.data_ptr() == weights[0].data_ptr()
    assert whole[:, 0, 0].tolist() == again[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    with torch.no_grad():
        weights[1].fill_(7.0)
    assert stacked(weights)[1].eq(7.0).all()
    (weights[1] * 2).sum().backward()
    assert weights[1].grad is not None
    weights[2].data = torch.full((2, 3), 9.0)
    assert stacked(weights)[:, 1, 2].tolist() == [0.0, 7.0, 9.0]
    assert stacked(weights[1:]).data_ptr() == weights[1].data_ptr()
