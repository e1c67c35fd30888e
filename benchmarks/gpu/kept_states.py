"""Prefills that keep many states: what each kept state costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.cases import Run, case
from benchmarks.gpu.operators import seconds_of
from benchmarks.gpu.right import IS_RIGHT
from benchmarks.operators.calls import BLOCK, TINY, Call, Calls, Sizes
from megatron_ext.mcore import platform

PROMPTS, KEPT = 28, 9


@case("gpu", reserved=20.0, needs_cuda=True)
def kept_states(run: Run) -> None:
    """Prefills of 28 prompts that keep 9 states each, beside the same prefills that keep none."""
    length = (KEPT + 1) * BLOCK - 55
    sizes = replace(TINY if run.is_quick else Sizes(), tokens=PROMPTS * length, prompts=PROMPTS)
    dtype = torch.float32 if run.is_quick else torch.bfloat16
    plain, keeping = (Calls(replace(sizes, kept=kept), dtype, platform.device()).all() for kept in (0, KEPT))
    for name, make in plain.items():
        if "prefill" in name and not name.startswith("attention"):
            run.attempt(name, partial(_compare, run, name, make, keeping[name]), like="prefill")


@torch.inference_mode()
def _compare(run: Run, name: str, plain: Callable[[], Call], keeping: Callable[[], Call]) -> None:
    """Report both times; kept states change no output, and all of them are written."""
    seconds, outputs, pools = [], [], []
    for make in (plain, keeping):
        torch.manual_seed(4)
        call = make()
        outputs.append(call.work())
        seconds.append(seconds_of(call.work)[0])
        pools.append(call.snapshots)
    is_right = torch.equal(*outputs) and not pools[1].isnan().any().item()
    cost = 1e6 * (seconds[1] - seconds[0]) / (PROMPTS * KEPT)
    figures = {"us": 1e6 * seconds[0], f"us with {PROMPTS * KEPT} kept": 1e6 * seconds[1], "us a kept state": cost}
    run.row(name, figures | {IS_RIGHT: is_right})
