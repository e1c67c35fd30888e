"""Peer: megatron-core 0.19.2 with the Mamba-2 hybrid; same shapes, types, prompts and calls, in a process of its own.

MEGATRON_0_19 names a folder with megatron, mamba_ssm and causal_conv1d, unpacked; docs/cuda.md says how to make one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Run, case
from benchmarks.gpu.work import LARGE, QUICK, SMALL, WORK, Work, first_tokens, tokens_a_second

if TYPE_CHECKING:
    from benchmarks.gpu.megatron_0_19.engine import Peer

EXPECTED = "0.19"


@dataclass(frozen=True)
class Job:
    """Measurements of the peer.

    Attributes:
        model: Fields of the model, by the names of `ModelConfig`.
        work: Amount of work.
        states: Torch's name of the dtype of the recurrent states.
        graphs: True if steps are replayed as CUDA graphs.
        graph_tokens: Tokens of the largest replayed step with prefills.
    """

    model: Mapping[str, Any]
    work: Work
    states: str
    graphs: bool = True
    graph_tokens: int = 512


# The peer tunes its kernels when they are first used: some fifty are compiled then, which the second case finds done.
@case("gpu", beside="gpu.mamba2", reserved=190.0, needs_cuda=True, packages="MEGATRON_0_19")
def megatron_0_19(run: Run) -> None:
    """Peer with recurrent states in bf16, its default; needs MEGATRON_0_19."""
    _measure_case(run, "bfloat16")


@case("gpu", beside="gpu.mamba2", reserved=15.0, needs_cuda=True, packages="MEGATRON_0_19")
def megatron_0_19_fp32_states(run: Run) -> None:
    """Peer with recurrent states in fp32, as ours are; needs MEGATRON_0_19."""
    _measure_case(run, "float32")


def _measure_case(run: Run, states: str) -> None:
    measure(run, Job(SMALL, QUICK, states) if run.is_quick else Job(LARGE, WORK, states))


def measure(run: Run, job: Job) -> None:
    """Measure first tokens and decode with the default schedule, then decode with the asynchronous one."""
    import torch

    logging.getLogger().setLevel(logging.WARNING)
    if not run.attempt("start", lambda: _start(run, job)):
        return
    from megatron.core.inference.config import AsyncScheduleMode
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    from benchmarks.gpu.megatron_0_19.engine import Peer
    from benchmarks.gpu.megatron_0_19.model import build

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for schedule in (AsyncScheduleMode.LEGACY, AsyncScheduleMode.ASYNC):
        made: list[Peer] = []

        def engine(schedule: AsyncScheduleMode = schedule, made: list[Peer] = made) -> None:
            model = build(job.model, getattr(torch, job.work.dtype), device, job.graphs)
            run.row("model", {"billions of parameters": sum(one.numel() for one in model.parameters()) / 1e9})
            made.append(Peer(model, job, schedule))

        if run.attempt(f"engine, {schedule.value} schedule", engine):
            is_default = schedule is AsyncScheduleMode.LEGACY
            _measure_engine(run, made[0], job.work, "default" if is_default else "async", is_default)
        del made, engine
        if job.graphs:
            delete_cuda_graphs()  # they belong to a model, and read the pools of its engine
        gc.collect()


def _start(run: Run, job: Job) -> None:
    """Install stand-ins, and initialize a world of one."""
    import torch

    from benchmarks.gpu.megatron_0_19 import stand_ins

    remarks = stand_ins.install()
    found = version("megatron-core")
    if not found.startswith(EXPECTED):
        raise RuntimeError(f"megatron-core {found} is first on the path; {EXPECTED} was expected")
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # graphs need it
    how = f"states of {job.states}, {'graphs' if job.graphs else 'eager'}"
    run.remark("; ".join([f"megatron-core {found}", how, *remarks]))


def _measure_engine(run: Run, peer: Peer, work: Work, schedule: str, is_default: bool) -> None:
    """Measure first tokens of the default schedule only: the other one does not change them."""
    for prefix in work.prefixes if is_default else ():
        for count in work.counts:
            part = partial(first_tokens, run, peer.serve, wait, prefix, count, work.vocabulary)
            run.attempt(f"{prefix} tokens, {count} at once", part, like=f"{prefix}")
    if is_default:
        run.row("cache", {"skipped prompt tokens": peer.skipped()})
    for count in work.decodes:
        part = partial(_decode, run, peer, work, count, schedule)
        run.attempt(f"{count} decode, {schedule} schedule", part, like="decode")


def _decode(run: Run, peer: Peer, work: Work, count: int, schedule: str) -> None:
    """Report the rate of a schedule, and the best rate so far, which ours is compared with."""
    peer.decode(work.decode_prompts(count), work.generated)
    rate = tokens_a_second(peer.step, wait, count, work.steps)
    peer.finish()
    row = f"{count} decode"
    best = run.page["rows"].get(row, {}).get("tokens/s")
    run.row(row, {f"{schedule} schedule, tokens/s": rate, "tokens/s": max(rate, float(best or 0.0))})


def wait() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
