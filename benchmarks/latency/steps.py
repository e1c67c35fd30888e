"""Time of a step: by context, by phase on the host, and by group of operations."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import Figure, Run, case
from benchmarks.measuring import Phases, timed
from benchmarks.models import NEMOTRON_SHAPED, TINY, Engine, engine, pair, prompts, random_model
from megatron_ext.config import RequestParams
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.models.load import LoadedModel
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep

REQUESTS, BLOCK, TURN = 8, 64, 8  # TURN: steps of an engine's turn


def decoding(loaded: LoadedModel, requests: int, context: int, steps: int, **params: object) -> Engine:
    """Build an engine in which requests with nothing in common decode, for `steps` steps more."""
    blocks = requests * (-(-(context + steps) // BLOCK) + 2)
    options = {"max_tokens": requests * context, "max_prefills_per_step": 0} if requests > REQUESTS else {}
    built = engine(loaded, block_size=BLOCK, block_count=blocks, max_requests=requests, **options)
    count = steps + 4 * requests + context // BLOCK
    sampling = RequestParams(count, ignore_eos=True, **params)
    built.start_decoding(prompts(requests, context, vocabulary=loaded.config.vocab_size or 0), sampling)
    return built


@case("latency", in_bench=True, quick={"rounds": 1, "contexts": (128, 256)})
def decode_context(run: Run, rounds: int = 6, contexts: tuple = (128, 2_048, 8_192)) -> None:
    """Step of 8 decoding requests after short and long contexts, which take turns."""
    loaded = pair().ours
    engines = {context: decoding(loaded, REQUESTS, context, (rounds + 1) * TURN) for context in contexts}
    times: dict[int, list[float]] = {context: [] for context in contexts}
    for turn in range(rounds + 1):
        for context, built in engines.items():
            taken = [timed(built.step) for _ in range(TURN)]
            times[context] += taken if turn else []  # the first turn warms up
    found = {context: statistics.median(taken) for context, taken in times.items()}
    for context, seconds in found.items():
        run.row(f"{context:,} tokens", {"step, ms": 1e3 * seconds, "over the shortest": seconds / found[contexts[0]]})


# The host's part

COMPUTE = (StepExecutor, "compute_eagerly")
HOST = {
    "plan": (Scheduler, "schedule"),
    "describe": (Scheduler, "describe"),
    "stage": (InferenceContext, "stage"),
    "commit": (Scheduler, "commit"),
    "output": (EngineCore, "report"),
}
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


def no_model(executor: StepExecutor, step: ScheduledStep) -> StepResult:
    """Stage a step, and compute nothing: every chunk that yields a token gets token 0."""
    context = executor._context
    context.stage(step)
    rows = context.staged.sampling
    context.clear_step()
    return StepResult(dict.fromkeys([row.request_id for row in rows], 0))


@case("latency", in_bench=True, quick={"rounds": 1, "steps": 2, "context": 16, "requests": (64,)})
def host_step(run: Run, rounds: int = 3, steps: int = 64, context: int = 1_000, requests: tuple = (64, 512)) -> None:
    """CPU time of the engine's thread in a decode step, by phase, with a model and with none."""
    for count in requests:
        found = host_costs(random_model(NEMOTRON_SHAPED), count, min(context, 128), {}, rounds, steps)
        run.row(f"{count} greedy", found)
    with mock.patch.object(*COMPUTE, no_model):
        for count in requests:
            for kind, params in (("greedy", {}), ("sampled", SAMPLED)):
                found = host_costs(random_model(TINY), count, context, params, rounds, steps)
                run.row(f"{count} {kind}, no model", found)


def host_costs(
    loaded: LoadedModel, requests: int, context: int, params: Mapping[str, object], rounds: int, steps: int
) -> dict[str, Figure]:
    """Return milliseconds of a step by phase: medians of rounds, of which a first one warms up.

    `streams` is what a server hands over in addition.
    """
    with Phases(time.thread_time).timing({**HOST, "forward, sampling": COMPUTE}) as phases:
        built = decoding(loaded, requests, context, (rounds + 1) * steps, **params)
        running = built.core.scheduler.queues.running
        streams = [EngineRequest(one.inputs, is_streamed=True, request=one) for one in running]
        measured = []
        for _ in range(rounds + 1):
            phases.own.clear()
            start = time.thread_time()
            for _ in range(steps):
                built.step()
            whole, costs = 1e3 * (time.thread_time() - start) / steps, phases.per_step(steps)
            start = time.thread_time()
            for stream in streams:
                stream.collect()
            costs |= {"the rest": whole - sum(costs.values()), "streams": 1e3 * (time.thread_time() - start)}
            measured.append(costs)
        built.core.suspend()
    costs = {name: statistics.median(one[name] for one in measured[1:]) for name in measured[-1]}
    host = sum(costs[name] for name in HOST)
    return {"plan to output, ms": host, **{f"{name}, ms": one for name, one in costs.items()}}


# Groups of operations: the first whose words are in an operation's name; the rest is element-wise work and copies.

GROUPS = {
    "products": ("mm", "linear", "matmul"),
    "attention": ("attention",),
    "scans": ("ssd", "scan", "delta_rule", "cumsum"),
    "convolution": ("conv",),
    "norms": ("norm",),
    "sampling": ("argmax", "softmax", "topk", "sort"),
}


@case("latency", in_bench=True, quick={"prefill": 300, "steps": 2})
def profiled(run: Run, prefill: int = 2_176, context: int = 128, steps: int = 4) -> None:
    """Milliseconds of a cold prefill and of a decode step of 8, by group of operations; the host's is what is left."""
    loaded = pair().ours
    built = engine(loaded)
    for prompt in prompts(2, prefill, "warm up"):
        built.generate([prompt], RequestParams(1))
    run.row(f"prefill of {prefill:,}", grouped(lambda: built.generate(prompts(1, prefill), RequestParams(1)), 1))
    built = decoding(loaded, REQUESTS, context, 10 * steps)
    run.row(f"decode of {REQUESTS}", grouped(lambda: [built.step() for _ in range(steps)], steps))


def grouped(work: Callable[[], object], times: int) -> dict[str, Figure]:
    """Return milliseconds of each group, divided by `times`."""
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    wall = 1e3 * (time.perf_counter() - start) / times
    groups: Counter[str] = Counter()
    for event in profiler.key_averages():
        name = event.key.lower()
        group = next((group for group, words in GROUPS.items() if any(word in name for word in words)), "element-wise")
        groups[group] += event.self_cpu_time_total / 1e3 / times
    groups["host"] = max(0.0, wall - sum(groups.values()))
    order = (*GROUPS, "element-wise", "host")
    return {f"{name}, ms": groups[name] for name in order} | {"together, ms": sum(groups.values())}
