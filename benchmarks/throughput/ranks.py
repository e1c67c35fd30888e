"""Several ranks on one machine: the host's part of a step, bytes that rank 0 broadcasts, and speed over gloo.

Ranks are processes that meet over a file; CPU, fp32, random weights. One rank has two threads where two have one each.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

from benchmarks.cases import Figure, Rows, Run, case
from benchmarks.latency.steps import COMPUTE, no_model
from benchmarks.measuring import Phases
from benchmarks.models import NEMOTRON_SHAPED, TINY, Engine, prompts, random_model
from megatron_ext.config import BatchingConfig, ModelConfig, ParallelConfig, RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.assemble import build_engine, build_worker
from megatron_ext.mcore.parallel_state.process_groups import make_parallel_context
from megatron_ext.parallel import commands, shared_results

ONE = ParallelConfig()
TP_2, PP_2 = ParallelConfig(tensor_model_parallel_size=2), ParallelConfig(pipeline_model_parallel_size=2)
LAYOUTS = {"one rank": ONE, "TP 2": TP_2, "PP 2": PP_2}
DECODING = 8  # requests
TIMEOUT = 600  # seconds, of everything that the ranks do
SENDS = {"commands": (commands.Link, "send"), "results": (shared_results.SharedExecutor, "share")}


@case("throughput", quick={"steps": 5})
def ranks_host(run: Run, steps: int = 200) -> None:
    """Step of 8 decoding requests without any model, on one rank and on two: planning, messages, commit, output."""
    base = None
    for name, parallel in LAYOUTS.items():
        found = on_ranks(host_cost, parallel, 1, steps)
        base = base or found["a step, us"]
        run.row(name, {**found, "over one rank": found["a step, us"] / base})


@case("throughput")
def ranks_bytes(run: Run) -> None:
    """Messages and bytes that rank 0 broadcasts in a step, by the events since the last step."""
    for name, sent in on_ranks(broadcast_bytes, TP_2, 1).items():
        run.row(name, sent)


@case("throughput", quick={"repeats": 1, "prompt": 64, "tokens": 4})
def ranks(run: Run, repeats: int = 3, prompt: int = 2048, tokens: int = 64) -> None:
    """Prefill and decode of a NemotronH-shaped model on one rank with two threads, and on two with one each."""
    base = None
    for name, parallel in LAYOUTS.items():
        found = on_ranks(speed_of, parallel, 2 if parallel == ONE else 1, repeats, prompt, tokens)
        base = base or found
        run.row(name, {**found, **{f"{column}, over one rank": found[column] / base[column] for column in found}})


def on_ranks(measure: Callable, parallel: ParallelConfig, threads: int, *arguments: object) -> dict:
    """Run `measure(parallel, *arguments)` on all ranks at once and return the result of rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_rank, args=(rank, Path(folder), threads, sender, measure, parallel, arguments))
            for rank in range(parallel.smallest_world)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            if not receiver.poll(TIMEOUT):
                raise TimeoutError(f"the ranks of {parallel} do not come to an end")
            found: dict = receiver.recv()
            return found
        except EOFError as end:
            raise RuntimeError("rank 0 has failed; its error is above") from end
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _rank(
    rank: int,
    folder: Path,
    threads: int,
    sender: Connection,
    measure: Callable,
    parallel: ParallelConfig,
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(threads)
    size = parallel.smallest_world
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = measure(parallel, *arguments)
    if rank == 0:
        sender.send(found)
    torch.distributed.barrier()
    platform.shut_down()


@contextmanager
def leading(parallel: ParallelConfig, config: ModelConfig) -> Iterator[Engine | None]:
    """Build an engine on rank 0; the others have followed it to its end when they get None."""
    platform.initialize(parallel)
    loaded = random_model(config, device=torch.device("cpu"), parallel=parallel)
    context = make_parallel_context(dataclasses.replace(parallel, distributed_timeout_minutes=TIMEOUT / 60))
    batching = BatchingConfig(block_size=64, block_count=400, max_requests=DECODING)
    parts = (loaded.model, loaded.config, loaded.tokenizer, batching)
    if context is not None and not context.is_driver:
        build_worker(*parts, dtype=loaded.dtype, parallel_context=context, packs_weights=True).follow()
        yield None
        return
    core = build_engine(*parts, dtype=loaded.dtype, parallel_context=context, packs_weights=True).core
    yield Engine(core)
    core.close()


def _add(built: Engine, count: int, length: int, generate: int, name: str) -> None:
    params = RequestParams(generate, enable_prefix_caching=False, ignore_eos=True)
    for prompt in prompts(count, length, name, TINY.vocab_size or 0):
        built.add(prompt, params)


def host_cost(parallel: ParallelConfig, steps: int) -> dict[str, float] | None:
    """Return microseconds of a step in which nothing is computed, and of its two broadcasts."""
    phases = Phases()
    with mock.patch.object(*COMPUTE, no_model), phases.timing(SENDS), leading(parallel, TINY) as built:
        if built is None:
            return None
        _add(built, DECODING, 16, 2 * steps + 50, "host")
        durations, sent = [], []
        for _ in range(steps + 10):
            start = time.perf_counter()
            built.step()
            durations.append(time.perf_counter() - start)
            sent.append(phases.per_step(1))
        built.drain()
    times = {name: 1e3 * statistics.median(one.get(name, 0.0) for one in sent[10:]) for name in SENDS}
    return {"a step, us": 1e6 * statistics.median(durations[10:]), **{f"{name}, us": times[name] for name in times}}


def broadcast_bytes(parallel: ParallelConfig) -> Rows | None:
    """Return the sizes of messages of several steps."""
    with counted(commands) as sent, counted(shared_results) as results, leading(parallel, TINY) as built:
        if built is None:
            return None

        def step() -> dict[str, Figure]:
            sent.clear()
            results.clear()
            built.step()
            found: dict[str, Figure] = {"command messages": len(sent), "command bytes": sum(sent)}
            return {**found, "result messages": len(results), "result bytes": sum(results)}

        found: Rows = {}
        for length in (100, 2_000):
            _add(built, 1, length, 30, "one")
            found[f"a request of {length:,} tokens"] = step()
        _add(built, DECODING - 2, 10, 30, "short")
        found[f"{DECODING - 2} requests of 10 tokens"] = step()
        found[f"nothing, {DECODING} requests decode"] = step()
        built.core.output.abort(next(iter(built.core.scheduler.queues.running)))
        found["an abort"] = step()
        built.drain()
        return found


@contextmanager
def counted(module: object) -> Iterator[list[int]]:
    """Record the sizes of a module's broadcasts inside this context."""
    sizes: list[int] = []

    def broadcast(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        sizes.append(tensor.nbytes)
        return torch.distributed.broadcast(tensor, *arguments, **options)

    with mock.patch.object(module, "broadcast", broadcast):
        yield sizes


def speed_of(parallel: ParallelConfig, repeats: int, prompt: int, tokens: int) -> dict[str, float] | None:
    """Return prompt tokens and generated tokens a second: medians of repeats, of which a first one warms up."""
    with leading(parallel, NEMOTRON_SHAPED) as built:
        if built is None:
            return None
        prefill, decode = [], []
        for _ in range(repeats + 1):
            prefill.append(prompt / _seconds(built, 1, prompt, 1))
            short = _seconds(built, DECODING, 16, 1)
            decode.append(DECODING * tokens / (_seconds(built, DECODING, 16, tokens + 1) - short))
        rates = (statistics.median(one[1:]) for one in (prefill, decode))
        return dict(zip(("prefill, tokens/s", "decode, tokens/s"), rates, strict=True))


def _seconds(built: Engine, count: int, length: int, generate: int) -> float:
    start = time.perf_counter()
    _add(built, count, length, generate, "speed")
    built.drain()
    return time.perf_counter() - start
