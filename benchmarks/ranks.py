"""Cost of several ranks on one machine: the host's part of a step, broadcast bytes, and speed over gloo.

Run: `python -m benchmarks.ranks`. CPU, fp32, random weights; ranks are processes of this machine that meet over a file.
One rank has two threads where two ranks have one each. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_step import Ids
from megatron_ext.config import BatchingConfig, ModelConfig, ParallelConfig, RequestParams
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine, build_worker
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.parallel_state.process_groups import make_parallel_context
from megatron_ext.models.build import build_model
from megatron_ext.parallel import link, shared_results

CPU = torch.device("cpu")
TINY = ModelConfig(
    hybrid_override_pattern="M*",
    hidden_size=32,
    num_attention_heads=2,
    mamba_state_dim=8,
    mamba_head_dim=8,
    mamba_num_groups=2,
    vocab_size=96,
)
# As in the other benchmarks.
NEMOTRON_SHAPED = ModelConfig(
    hybrid_override_pattern="M-M*M-M*",
    hidden_size=256,
    ffn_hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=32,
    mamba_num_heads=16,
    mamba_head_dim=32,
    mamba_state_dim=64,
    mamba_num_groups=2,
    squared_relu=True,
    vocab_size=4096,
    max_position_embeddings=16_384,
)
ONE = ParallelConfig()
LAYOUTS = {"one rank": ONE, "TP 2": ParallelConfig(tensor_model_parallel_size=2)}
LAYOUTS["PP 2"] = ParallelConfig(pipeline_model_parallel_size=2)
DECODING = 8  # requests
TIMEOUT = 600  # seconds, of everything that a world does


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    console = Console(highlight=False, width=120)
    console.print(host_table(options.steps))
    console.print(bytes_table())
    console.print(speed_table(options.repeats))


def host_table(steps: int) -> Table:
    """A step without a model: planning, messages, what is sent, commit, output."""
    title = f"a step of {DECODING} decoding requests without any model; x: beside one rank"
    table = Table("", "a step, us", "x", "commands, us", "results, us", title=title)
    base = None
    for name, parallel in LAYOUTS.items():
        cost = in_world(host_cost, parallel, 1, steps)
        base = base or cost.step
        row = (f"{value * 1e6:.0f}" for value in (cost.commands, cost.results))
        table.add_row(name, f"{cost.step * 1e6:.0f}", f"{cost.step / base:.2f}", *row)
    return table


def bytes_table() -> Table:
    """Table of what rank 0 broadcasts, by what has happened since the last step."""
    found = in_world(broadcast_bytes, LAYOUTS["TP 2"], 1)
    table = Table("since the last step", "commands: messages", "bytes", "results: messages", "bytes")
    for name, sent in found.items():
        table.add_row(name, *map(str, (len(sent.commands), sum(sent.commands), len(sent.results), sum(sent.results))))
    return table


def speed_table(repeats: int) -> Table:
    """Tokens a second of a small NemotronH-shaped model."""
    table = Table("", "prefill 1 x 2048, tokens/s", "x", "decode 8 x 64, tokens/s", "x", title="two cores")
    base = None
    for name, parallel in LAYOUTS.items():
        threads = 2 if parallel == ONE else 1
        speed = in_world(speed_of, parallel, threads, repeats)
        base = base or speed
        cells = [(f"{own:.0f}", f"{own / first:.2f}") for own, first in zip(speed, base, strict=True)]
        table.add_row(f"{name}, {threads} thread(s) each", *cells[0], *cells[1])
    return table


# Worlds


def in_world(measure: Callable, parallel: ParallelConfig, threads: int, *arguments: object):
    """Run `measure(parallel, *arguments)` on all ranks at once and return the result of rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        world = range(parallel.smallest_world)
        processes = [
            context.Process(target=_rank, args=(rank, Path(folder), threads, sender, measure, parallel, arguments))
            for rank in world
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            if not receiver.poll(TIMEOUT):
                raise TimeoutError(f"the ranks of {parallel} do not come to an end")
            return receiver.recv()
        except EOFError as end:
            raise RuntimeError("rank 0 has failed; it says above how") from end
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
def leading(parallel: ParallelConfig, config: ModelConfig) -> Iterator[InferenceEngine | None]:
    """An engine on rank 0; the others have followed until its end when they get None."""
    platform.initialize(parallel)
    model = build_model(config, device=CPU, parallel=parallel)
    parallel_context, tokenizer = (
        make_parallel_context(dataclasses.replace(parallel, distributed_timeout_minutes=TIMEOUT / 60)),
        Ids(),
    )
    tokenizer.vocab_size = config.vocab_size
    batching = BatchingConfig(block_size=64, block_count=400, max_requests=DECODING)
    if parallel_context is not None and not parallel_context.is_driver:
        build_worker(
            model, config, tokenizer, batching, dtype=torch.float32, parallel_context=parallel_context
        ).follow()
        yield None
        return
    engine = build_engine(model, config, tokenizer, batching, dtype=torch.float32, parallel_context=parallel_context)
    yield engine
    engine.close()


def add(engine: InferenceEngine, first_id: int, count: int, length: int, generate: int) -> None:
    """Requests without anything in common."""
    vocabulary = engine.controller.inference_wrapped_model.inference_wrapper_config.padded_vocab_size
    params = RequestParams(num_tokens_to_generate=generate, enable_prefix_caching=False, ignore_eos=True)
    for request_id in range(first_id, first_id + count):
        source = random.Random(request_id)
        engine.add_request(request_id, [source.randrange(vocabulary) for _ in range(length)], params)


def finish(engine: InferenceEngine) -> int:
    """All requests to their end: how many tokens they generated."""
    generated = 0
    while engine.has_unfinished_requests():
        generated += sum(len(one.generated_tokens) for one in engine.step_modern()["finished_request_records"])
    return generated


# What is measured


@dataclass(frozen=True)
class HostCost:
    """Seconds of a step, in the median, and of its two broadcasts on rank 0."""

    step: float
    commands: float
    shared_results: float


def host_cost(parallel: ParallelConfig, steps: int) -> HostCost | None:
    """Steps in which nothing is computed and every request gets a token."""
    with (
        mock.patch.object(InferenceController, "compute_step", _no_model),
        timed(link.Link, "send") as sent,
        timed(shared_results.Results, "share") as shared,
        leading(parallel, TINY) as engine,
    ):
        if engine is None:
            return None
        add(engine, 0, DECODING, 16, steps + 20)
        durations = []
        for _ in range(steps + 10):
            start = time.perf_counter()
            engine.step_modern()
            durations.append(time.perf_counter() - start)
        cost = [statistics.median(one[10:]) if one else 0.0 for one in (durations, sent, shared)]
        finish(engine)
        return HostCost(*cost)


def _no_model(controller: InferenceController) -> StepResult:
    step = controller.inference_wrapped_model.inference_context.step
    return StepResult({row.request_id: 0 for row in step.sampling}, {}, {}, {})


@contextmanager
def timed(owner: type, name: str) -> Iterator[list[float]]:
    """Within it the seconds of each call of a method are written down."""
    method, seconds = getattr(owner, name), []

    def call(*arguments: object) -> object:
        start = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            seconds.append(time.perf_counter() - start)

    with mock.patch.object(owner, name, call):
        yield seconds


@dataclass
class Sent:
    """Sizes of messages, in bytes."""

    commands: list[int] = field(default_factory=list)
    shared_results: list[int] = field(default_factory=list)


def broadcast_bytes(parallel: ParallelConfig) -> dict[str, Sent] | None:
    """Each step's messages."""
    with counted(link) as commands, counted(shared_results) as tokens, leading(parallel, TINY) as engine:
        if engine is None:
            return None

        def sent_by_a_step() -> Sent:
            commands.clear()
            tokens.clear()
            engine.step_modern()
            return Sent(list(commands), list(tokens))

        found = {}
        for length in (100, 2_000):
            add(engine, length, 1, length, 30)
            found[f"a request of {length:,} tokens"] = sent_by_a_step()
        add(engine, 0, DECODING - 2, 10, 30)
        found[f"{DECODING - 2} requests of 10 tokens"] = sent_by_a_step()
        found[f"nothing, {DECODING} requests decode"] = sent_by_a_step()
        engine.abort_request(100)
        found["an abort"] = sent_by_a_step()
        finish(engine)
        return found


@contextmanager
def counted(module: object) -> Iterator[list[int]]:
    """Within it the sizes of a module's broadcasts are written down."""
    sizes: list[int] = []

    def broadcast(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        sizes.append(tensor.nbytes)
        return torch.distributed.broadcast(tensor, *arguments, **options)

    with mock.patch.object(module, "broadcast", broadcast):
        yield sizes


def speed_of(parallel: ParallelConfig, repeats: int) -> tuple[float, float] | None:
    """Prompt tokens and generated tokens a second, in the median."""
    with leading(parallel, NEMOTRON_SHAPED) as engine:
        if engine is None:
            return None
        prefill, decode = [], []
        for repeat in range(repeats + 1):  # the first one warms up
            prefill.append(2048 / seconds_of(engine, 100 * repeat, 1, 2048, 1))
            short = seconds_of(engine, 100 * repeat + 10, DECODING, 16, 1)
            decode.append(DECODING * 64 / (seconds_of(engine, 100 * repeat + 20, DECODING, 16, 65) - short))
        return statistics.median(prefill[1:]), statistics.median(decode[1:])


def seconds_of(engine: InferenceEngine, first_id: int, count: int, length: int, generate: int) -> float:
    """Seconds from the arrival of the first request to the end of the last one."""
    start = time.perf_counter()
    add(engine, first_id, count, length, generate)
    generated = finish(engine)
    if generated != count * generate:
        raise RuntimeError(f"{generated} tokens were generated, not {count * generate}")
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
