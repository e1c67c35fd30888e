"""Kernels of the convolution and of the scans beside their formulas; on CPUs under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.backends import log_once
from megatron_ext.ops.triton.kernel_registry import TYPE_NAMES, Config, Kernel, all_kernels, watch
from tests.unit_tests.ops.backends import interpreted
from tests.unit_tests.ops.state_cases import DONE, LENGTHS, Steps

pytestmark = [
    pytest.mark.skipif(
        triton.problem(platform.device()) is not None,
        reason=f"no kernel runs here: {triton.problem(platform.device())}",
    ),
    *interpreted(triton.NAME),
]

# Kernels and the operator through which they are tested, with the constant that its states' size chooses.
COVERED = {
    "conv_prefill": ("causal_conv1d", "WINDOW"),
    "conv_states": ("causal_conv1d", "WINDOW"),
    "conv_decode": ("causal_conv1d", "WINDOW"),
    "ssd_prefill": ("ssd", "N"),
    "ssd_decode": ("ssd", "N"),
    "selective_prefill": ("selective_scan", "N"),
    "selective_decode": ("selective_scan", "N"),
    "delta_tiles": ("gated_delta_rule", "CHANNELS"),
    "delta_prefill": ("gated_delta_rule", "K"),
    "delta_decode": ("gated_delta_rule", "K"),
}
DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
KERNELS = {kernel.name: kernel for kernel in all_kernels()} if triton.can_be_imported() else {}


def variants() -> list[tuple[Kernel, Config, dict[str, str]]]:
    """All compiled configurations."""
    covered = [KERNELS[name] for name in COVERED if KERNELS]
    return [(kernel, config, dict(types)) for kernel in covered for config, types in kernel.variants()]


def name_of(value: object) -> str:
    if isinstance(value, Kernel | Config):
        return value.name
    return "-".join(value.values()) if isinstance(value, dict) else str(value)


def is_small(kernel: Kernel, config: Config, types: dict[str, str]) -> bool:
    """Select one configuration of each operator in fp32 and in 16 bits."""
    is_first = config == next(one for one, found in kernel.variants() if dict(found) == types)
    return kernel.name.endswith("prefill") and types["S"] == "fp32" and is_first and types.get("T") != "fp16"


def run(kernel: Kernel, config: Config, types: dict[str, str]) -> None:
    """The steps of the operator, of a size that chooses this configuration; it is launched."""
    operator, constant = COVERED[kernel.name]
    size = config[constant] - (3 if constant == "N" or (constant == "K" and config[constant] < 65) else 0)
    with watch() as launches:
        Steps(operator, size, DTYPES[types.get("T", "fp32")], DTYPES[types.get("S", "fp32")]).run()
    assert (kernel.name, config, tuple(sorted(types.items()))) in [launch[:3] for launch in launches]
    assert {launch.kernel for launch in launches} == {name for name, (other, _) in COVERED.items() if other == operator}


SMALL = [one for one in variants() if is_small(*one)]


@pytest.mark.parametrize(("kernel", "config", "types"), SMALL, ids=name_of)
def test_kernels_equal_their_formulas(kernel: Kernel, config: Config, types: dict[str, str]) -> None:
    """CU-1, CU-2: lengths around tiles, states kept within them, padding, slots of others."""
    run(kernel, config, types)


@pytest.mark.kernels
@pytest.mark.parametrize(("kernel", "config", "types"), [one for one in variants() if one not in SMALL], ids=name_of)
def test_every_configuration_computes_the_same(kernel: Kernel, config: Config, types: dict[str, str]) -> None:
    """CU-2: all compiled configurations agree."""
    run(kernel, config, types)


def test_16_bit_inputs_of_ssd_in_order_are_computed_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """CU-1, CU-2, CU-10: by programs that share a head's states; outputs are rounded once."""
    log_once.cache_clear()
    narrow, wide = (Steps("ssd", 130, torch.bfloat16, torch.float32) for _ in range(2))
    wide.parts = [[t.float() for t in part] for part in wide.parts]
    span = [5, 7], [0, 0], [20, 17]
    found, expected = narrow.prefill(*span), wide.prefill(*span)
    narrow.check_outputs("in order", found, *span)
    assert torch.equal(found, expected.to(torch.bfloat16))
    assert torch.equal(narrow.live[[5, 8]], wide.live[[5, 8]])
    assert capsys.readouterr().err.count("converts inputs of a prefill to fp32") == 1


@pytest.mark.usefixtures("fixed_order_dot")
@pytest.mark.parametrize(
    ("name", "size", "cut"),
    [
        ("causal_conv1d", 4, 21),
        ("selective_scan", 16, 21),
        ("ssd", 16, 16),
        ("ssd", 16, 48),
        ("gated_delta_rule", 16, 32),
    ],
)
def test_bits_do_not_depend_on_cuts(name: str, size: int, cut: int) -> None:
    """CU-2: cuts are at any token, for SSD at multiples of its tile; kept states and neighbours have no effect."""
    whole, parts = (Steps(name, size, torch.float32, torch.float32) for _ in range(2))
    wanted = whole.prefill([5, 7], [0, 0], [63, 65], kept=[(7, cut + 3, 1)])
    first = parts.prefill([7], [0], [cut])
    rest = parts.prefill([2, 7], [0, cut], [15, 65])
    assert torch.equal(torch.cat([first, rest[15:]]), wanted[63:])
    slot = 8  # of the last sequence
    assert torch.equal(parts.live[slot], whole.live[slot])


@pytest.mark.parametrize("name", ["causal_conv1d", "selective_scan", "ssd", "gated_delta_rule"])
def test_a_swapped_slot_is_seen(name: str) -> None:
    """Negative control: two sequences go on from each other's states."""
    steps = Steps(name, 4 if name == "causal_conv1d" else 16, torch.float32, torch.float32)
    steps.prefill([5, 7], [0, 0], [DONE[5], DONE[7]])
    steps.live[[5, 8]] = steps.live[[8, 5]]
    y = steps.prefill([5, 7], [DONE[5], DONE[7]], [LENGTHS[5], LENGTHS[7]])
    with pytest.raises(AssertionError):
        steps.check_outputs("swapped", y, [5, 7], [DONE[5], DONE[7]], [LENGTHS[5], LENGTHS[7]])


@pytest.mark.parametrize("name", ["causal_conv1d", "selective_scan", "ssd", "gated_delta_rule"])
def test_shapes_without_a_kernel_use_the_reference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """CU-3: shapes without a kernel, said once."""
    log_once.cache_clear()
    size = {"causal_conv1d": 5, "selective_scan": 65, "ssd": 257, "gated_delta_rule": 129}[name]
    for _ in range(2):
        steps = Steps(name, size, torch.float32, torch.float32)
        with watch() as launches:
            reference_prefill(steps)
        assert not launches
    assert capsys.readouterr().err.count("the reference computes it") == 1


def reference_prefill(steps: Steps) -> None:
    """Compute one whole sequence without padding, which the reference does not support."""
    y = steps.prefill([1], [0], [3], padding=False)
    steps.check_outputs("prefill", y, [1], [0], [3])
