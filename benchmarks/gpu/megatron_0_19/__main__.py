"""Measure the peer: `python -m benchmarks.gpu.megatron_0_19 JOB.json`, with its packages first on PYTHONPATH."""

from __future__ import annotations

import gc
import logging
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.megatron_0_19 import stand_ins
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.work import Figures, RequestSpec, Work, decode_row, first_tokens, prompt, tokens_a_second

if TYPE_CHECKING:
    from benchmarks.gpu.megatron_0_19.engine import Peer

EXPECTED = "0.19"


def main() -> int:
    """Do the job that is told.

    Returns:
        The exit code.
    """
    job = RequestSpec.read(Path(sys.argv[1]))
    notes = Notes(Path(job.figures), job.seconds)
    logging.getLogger().setLevel(logging.WARNING)
    if not notes.attempt("start", lambda: _start(job)):
        return 1
    return measure(job, notes)


def _start(job: RequestSpec) -> Figures:
    """Packages in place, and a world of one."""
    remarks = stand_ins.install()
    found = version("megatron-core")
    if not found.startswith(EXPECTED):
        raise RuntimeError(f"megatron-core {found} is first on the path; {EXPECTED} was expected")
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # graphs insist on it
    states = f"states of {job.states}, {'graphs' if job.graphs else 'eager'}"
    return {"version": found, "settings": "; ".join([states, *remarks])}


def measure(job: RequestSpec, notes: Notes) -> int:
    """An engine for the times to the first token and for decode, then another one that schedules ahead."""
    from megatron.core.inference.config import AsyncScheduleMode
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    from benchmarks.gpu.megatron_0_19.engine import Peer
    from benchmarks.gpu.megatron_0_19.model import build

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for schedule in (AsyncScheduleMode.LEGACY, AsyncScheduleMode.ASYNC):
        made: list[Peer] = []

        def engine(schedule: AsyncScheduleMode = schedule, made: list[Peer] = made) -> Figures:
            model = build(job.model, getattr(torch, job.work.dtype), device, job.graphs)
            made.append(Peer(model, job, schedule))
            return {"billions of parameters": sum(one.numel() for one in model.parameters()) / 1e9}

        is_first = schedule is AsyncScheduleMode.LEGACY
        if notes.attempt(f"engine, {schedule.value} schedule", engine):
            plain = "graphs" if job.graphs else "eager"
            _measure_engine(made[0], job, notes, plain if is_first else f"{plain}, async schedule", is_first)
        del made, engine
        if job.graphs:
            delete_cuda_graphs()  # they belong to a model, and read the pools of its engine
        gc.collect()
    return 1 if notes.page["failed"] else 0


def _measure_engine(peer: Peer, job: RequestSpec, notes: Notes, how: str, is_first: bool) -> None:
    """Times to the first token of the first engine only: what schedules ahead does not change them."""
    work = job.work
    for prefix in work.prefixes if is_first else ():
        for count in work.counts:
            piece = partial(first_tokens, peer.serve, wait, prefix, count, work.vocabulary)
            notes.attempt(f"{prefix} tokens, {count} at once", piece, like=f"{prefix}")
    if is_first:
        notes.tell("prompt tokens that its cache saved", peer.skipped())
    for count in work.decodes:
        notes.attempt(decode_row(count, how), partial(_decode, peer, work, count, how), like="decode")


def _decode(peer: Peer, work: Work, count: int, how: str) -> Figures:
    peer.decode([prompt(work.context, work.vocabulary, f"decode {i}") for i in range(count)], work.generated)
    rate = tokens_a_second(peer.step, wait, count, work.steps)
    peer.finish()
    return {decode_row(count, how): rate}


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what is left of event loops and groups would only be taken apart
