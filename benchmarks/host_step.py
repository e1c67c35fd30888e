"""Host time of a step with only decoding requests, in groups: plan, describe, stage, commit, output, the rest.

Run: `python -m benchmarks.host_step`. CPU time of the thread that steps. The first columns have a model of 5 million
parameters in them, whose forward leaves caches as it does in earnest; in the others nothing is computed, and every
request gets the same token. `streams` is what a server hands over beside that. Compare figures of one run only.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.decode_step import MODEL, VOCABULARY, Ids
from benchmarks.measuring import keep_figures, part_arguments
from benchmarks.ranks import NEMOTRON_SHAPED
from megatron_ext.config import BatchingConfig, ModelConfig, RequestParams
from megatron_ext.engine import replica
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.models.build import build_model
from megatron_ext.scheduling.scheduler import Scheduler

REQUESTS = (64, 512)
BLOCK, CONTEXT = 64, 1_000
STEPS = 64  # as many as a block has tokens, so that every request begins one of its own
HOST = {
    "plan": (Scheduler, "schedule"),
    "describe": (replica, "describe_step"),
    "stage": (InferenceContext, "stage"),
    "commit": (Scheduler, "commit"),
    "output": (EngineCore, "report"),
}
COMPUTE = (InferenceController, "compute_step")
KINDS = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.9}}


def main() -> None:
    """Measure and print."""
    parser = part_arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help=f"of {STEPS} steps")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens behind each request")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = 1 if options.quick else options.rounds
    found = {}
    for count in REQUESTS:
        found[f"{count} greedy"] = step_costs(NEMOTRON_SHAPED, count, 16 if options.quick else 128, {}, rounds)
    with mock.patch.object(*COMPUTE, _no_model):
        for count in REQUESTS:
            for kind, params in KINDS.items():
                found[f"{count} {kind}, no model"] = step_costs(MODEL, count, options.context, params, rounds)
    Console(highlight=False, width=140).print(costs_table(found))
    keep_figures(options, found)
    platform.shut_down()


def costs_table(found: Mapping[str, Mapping[str, float]]) -> Table:
    """Milliseconds of a step, by group."""
    table = Table("group", *(f"{name}, ms" for name in found))
    table.add_row("plan to output", *(f"{costs['goal']:.2f}" for costs in found.values()), end_section=True)
    for group in next(iter(found.values())):
        if group != "goal":
            table.add_row(group, *(f"{costs[group]:.2f}" for costs in found.values()))
    return table


def step_costs(
    config: ModelConfig, requests: int, context: int, params: Mapping[str, object], rounds: int
) -> dict[str, float]:
    """Milliseconds of each group, the median of rounds; a round is the mean of its steps."""
    model = build_model(config, device=torch.device("cpu"))
    with ExitStack() as stack:
        places = {**HOST, "forward, sampling": COMPUTE}
        spent = {name: stack.enter_context(timed(*place)) for name, place in places.items()}
        engine = decoding_engine(model, config, requests, context, params, (rounds + 1) * STEPS)
        living = [engine.get_request(name) for name in range(requests)]
        streams = [EngineRequest(one.prompt_tokens, one.params, is_streamed=True, request=one) for one in living]
        measured = [round_costs(engine, streams, spent) for _ in range(rounds + 1)][1:]  # the first warms up
        engine.suspend()
    costs = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    return {"goal": sum(costs[name] for name in HOST), **costs}


def decoding_engine(
    model: torch.nn.Module,
    config: ModelConfig,
    requests: int,
    context: int,
    params: Mapping[str, object],
    steps: int,
) -> InferenceEngine:
    """An engine in which so many requests decode for so many steps more."""
    source = random.Random(requests)
    blocks = requests * (-(-(context + steps) // BLOCK) + 2)
    batching = BatchingConfig(
        block_size=BLOCK,
        block_count=blocks,
        max_requests=requests,
        max_tokens=requests * context,
        max_prefills_per_step=0,
    )
    engine = build_engine(model, config, Ids(), batching, dtype=torch.float32)
    row_metadata = RequestParams(num_tokens_to_generate=steps + STEPS, ignore_eos=True, **params)
    for request_id in range(requests):
        engine.add_request(request_id, [source.randrange(VOCABULARY) for _ in range(context)], row_metadata)
    while any(not engine.get_request(request_id).is_decoding for request_id in range(requests)):
        engine.core.step()
    return engine


def round_costs(
    engine: InferenceEngine, streams: Sequence[EngineRequest], spent: Mapping[str, list[float]]
) -> dict[str, float]:
    """Milliseconds of a step in each group, on average."""
    for seconds in spent.values():
        seconds.clear()
    start = time.thread_time()
    for _ in range(STEPS):
        engine.core.step()
    whole = time.thread_time() - start
    start = time.thread_time()
    for stream in streams:
        stream.collect()
    handed = time.thread_time() - start
    costs = {name: 1e3 * sum(seconds) / STEPS for name, seconds in spent.items()}
    return {**costs, "the rest": 1e3 * whole / STEPS - sum(costs.values()), "streams": 1e3 * handed}


def _no_model(controller: InferenceController) -> StepResult:
    """Every chunk that yields a token gets the same one."""
    step = controller.inference_wrapped_model.inference_context.step
    return StepResult(dict.fromkeys([row.request_id for row in step.sampling], 0), {}, {}, {})


@contextmanager
def timed(owner: object, name: str) -> Iterator[list[float]]:
    """Within it the CPU seconds of each call are written down."""
    function: Callable[..., object] = getattr(owner, name)
    seconds: list[float] = []

    def call(*arguments: object, **options: object) -> object:
        start = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds.append(time.thread_time() - start)

    with mock.patch.object(owner, name, call):
        yield seconds


if __name__ == "__main__":
    main()
