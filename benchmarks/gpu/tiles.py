"""Correctness of tiled SSD on this device, in its own dtype: beside plain torch, and split beside unsplit."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu.work import Figures
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.varlen import Resumes, pack_chunks

TOKENS, CUT, HEADS, GROUPS, CHANNELS, STATES, BLOCK = 1000, 640, 20, 2, 64, 128, 64
OUTPUTS, LAST_STATES = 2.0**-6, 2.0**-12
"""Parts of the largest that outputs in bf16, and states in fp32, may differ by."""


class Layer:
    """Random inputs of one sequence, and the place of its state."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(7)
        shapes = ((TOKENS, HEADS, CHANNELS), (TOKENS, GROUPS, STATES), (TOKENS, GROUPS, STATES))
        self._x, self._b, self._c = (torch.randn(one, generator=generator).bfloat16().to(device) for one in shapes)
        self._dt = (torch.rand(TOKENS, HEADS, generator=generator) * 0.1 + 0.01).to(device)
        self._a = -(torch.rand(HEADS, generator=generator) + 0.1).to(device)
        self._live = torch.full((2, HEADS, CHANNELS, STATES), torch.nan, device=device)

    def prefill(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Outputs of these tokens, and the state after them, from a zero state or from the end of the last call."""
        device = self._x.device
        ends = torch.full((1,), end, device=device)
        cuts = [min(BLOCK, end - one) for one in range(start, end, BLOCK)]
        chunks = replace(pack_chunks([cuts], device), resumes=Resumes(BLOCK, ends))
        slots = StateSlots(torch.ones_like(ends), torch.full((1,), start > 0, device=device))
        x, dt, b, c = (t[start:end] for t in (self._x, self._dt, self._b, self._c))
        y = SSD.prefill(x, dt, self._a, b, c, chunks=chunks, slots=slots, live=self._live, snapshots=None)
        return y, self._live[1].clone()


@torch.inference_mode()
def check(device: torch.device) -> Figures:
    """Outputs and states by the device's operators beside the reference's, and the same cut in two at a block."""
    with preferring("reference"):
        expected = Layer(device).prefill(0, TOKENS)
    outputs, state = Layer(device).prefill(0, TOKENS)
    parts = Layer(device)
    cut = [parts.prefill(0, CUT), parts.prefill(CUT, TOKENS)]
    errors = [_apart(one, other) for one, other in zip((outputs, state), expected, strict=True)]
    same = bool(torch.equal(torch.cat([y for y, _ in cut]), outputs) and torch.equal(cut[-1][1], state))
    is_right = errors[0] <= OUTPUTS and errors[1] <= LAST_STATES
    return {
        "ssd by tiles: outputs differ by": errors[0],
        "ssd by tiles: states differ by": errors[1],
        "ssd by tiles is right": is_right,
        "ssd by tiles: the same bits cut at a block": same,
    }


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as part of the largest number; NaN is infinitely far."""
    gap = (found.double() - expected.double()).abs() / expected.double().abs().max()
    return float(gap.nan_to_num(torch.inf).max())
