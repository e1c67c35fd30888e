"""MoE layers by grouped products, as a CUDA device computes them; on CPUs under Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megatron_ext.mcore import platform
from megatron_ext.mcore.layers import grouped_moe
from megatron_ext.ops import triton
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.triton.kernel_registry import Kernel, watch
from tests.unit_tests.mcore.layers.test_moe import LAYERS, LEAST_MARGIN, SIGMOID, make_hidden, make_layer, run_layer
from tests.unit_tests.support.launches import counted
from tests.unit_tests.support.moe import reference_moe, routing_margin
from tests.unit_tests.support.programs import ProgramRecorder, differences

pytestmark = pytest.mark.skipif(
    triton.problem(platform.device()) is not None,
    reason=f"no kernel runs here: {triton.problem(platform.device())}",
)

GROUPED = {
    **{name: of for name, of in LAYERS.items() if name not in ("latent", "groups", "groups ranked by three")},
    "latent": dataclasses.replace(SIGMOID, moe_latent_size=12),
}
KERNELS = {"choose_experts", "sort_by_expert", "combine"}
MOST = 12
"""Launches of a layer with shared experts, its sum and the norm after it."""


def run_grouped(layer: nn.Module, hidden: Tensor) -> Tensor:
    with torch.inference_mode(), preferring(triton.NAME):
        return run_layer(layer, hidden)


@pytest.mark.parametrize("name", GROUPED)
def test_equals_reference(name: str) -> None:
    """CU-11: every kind of routing but groups; NaN stays in its own row; fewer tokens than experts."""
    config = GROUPED[name]
    layer, hidden = make_layer(config), make_hidden(config, 3, 1)
    assert routing_margin(layer, hidden.flatten(0, 1), config) > LEAST_MARGIN
    expected = reference_moe(layer, hidden.flatten(0, 1), config).float()
    with watch() as launches:
        torch.testing.assert_close(run_grouped(layer, hidden), expected, atol=1e-5, rtol=1e-5)
    assert {one.kernel for one in launches} >= KERNELS
    hidden[2:] = torch.nan
    torch.testing.assert_close(run_grouped(layer, hidden)[:2], expected[:2], atol=1e-5, rtol=1e-5)


def test_softmax_of_all_experts_equals_the_plain_layer() -> None:
    """CU-11: weights are shares of all experts."""
    config = dataclasses.replace(LAYERS["softmax"], moe_router_pre_softmax=True)
    layer, hidden = make_layer(config), make_hidden(config, 3, 1)
    with torch.inference_mode():
        expected = run_layer(layer, hidden)
    torch.testing.assert_close(run_grouped(layer, hidden), expected, atol=1e-5, rtol=1e-5)
    layer.config.moe_router_pre_softmax = layer.router.config.moe_router_pre_softmax = False
    assert (run_grouped(layer, hidden) - expected).abs().max() > 1e-2


def test_new_weights_are_seen() -> None:
    """CU-11: in place, at new addresses, and of one expert only."""
    config = GROUPED["softmax"]
    layer, hidden = make_layer(config), make_hidden(config, 3, 1)
    run_grouped(layer, hidden)
    for change in ("in place", "all", "one"):
        for number, expert in enumerate(layer.experts.local_experts):
            weight = expert.linear_fc1.weight
            with torch.no_grad():
                if change == "in place":
                    weight.mul_(2.0)
                elif change == "all" or number == 3:
                    weight.data = weight.data * 1.5
        expected = reference_moe(layer, hidden.flatten(0, 1), config).float()
        torch.testing.assert_close(run_grouped(layer, hidden), expected, atol=1e-4, rtol=1e-5)


def test_two_routings_are_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-4, CU-11: nothing is read back, whatever the routing; the plain layer is the negative control."""
    plain_launch = Kernel.launch

    def launch(*arguments: object, **named: object) -> None:
        with _disable_current_modes():  # what the interpreter does is not the layer's
            plain_launch(*arguments, **named)

    monkeypatch.setattr(Kernel, "launch", launch)
    config, programs = GROUPED["softmax"], []
    layer, place = make_layer(config), torch.zeros(5, 1, config.hidden_size)
    run_grouped(layer, place)
    for length in (5, 6):
        place.copy_(make_hidden(config, length, 1)[:5])
        for run in (run_grouped, run_layer):
            programs.append(ProgramRecorder())
            with torch.inference_mode(), programs[-1]:
                run(layer, place)
    grouped, plain, other_grouped, other_plain = programs
    assert not differences(grouped, other_grouped)
    assert not grouped.unfit
    assert differences(plain, other_plain)
    assert plain.unfit


def test_a_layer_has_few_launches() -> None:
    """CU-11: shared experts and ten of 72; one less than the limit, for the sum and the norm after the layer.

    On CUDA the router's product in fp32 takes inputs of 16 bits, so the router here has their type. Four rows, since a
    CPU's router pads fewer.
    """
    name = "softmax, SwiGLU, shared experts, width of the MLP"
    config = dataclasses.replace(LAYERS[name], num_experts=72, moe_router_topk=10)
    layer, hidden = make_layer(config, dtype=torch.bfloat16), make_hidden(config, 4, 1).to(torch.bfloat16)
    layer.router.config.moe_router_dtype = None
    run_grouped(layer, hidden)
    with counted({"E": layer}) as counter:
        run_grouped(layer, hidden)
    assert counter.of("E") <= MOST - 1, counter.launches


def test_layers_without_it_are_computed_as_before() -> None:
    """CU-11: named; and without a device unless it is asked for."""
    for config, words in ((LAYERS["groups"], "groups"), (dataclasses.replace(SIGMOID, moe_latent_size=10), "16 bytes")):
        layer, hidden = make_layer(config), make_hidden(config, 3, 1)
        assert words in grouped_moe.why_unsupported(layer)
        with watch() as launches:
            expected = reference_moe(layer, hidden.flatten(0, 1), config).float()
            torch.testing.assert_close(run_grouped(layer, hidden), expected, atol=1e-5, rtol=1e-5)
        assert not KERNELS & {one.kernel for one in launches}
    layer, hidden = make_layer(GROUPED["softmax"]), make_hidden(GROUPED["softmax"], 3, 1)
    assert grouped_moe.why_unsupported(layer) is None
    with torch.inference_mode(), watch() as launches:
        run_layer(layer, hidden)
    assert not launches
