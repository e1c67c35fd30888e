"""What the host does in a step in which everybody decodes, in groups: plan, describe, stage, commit, output, the rest.

Run: `python -m benchmarks.host_step`. CPU time, one thread. Nothing is computed: every request gets the same token in
place of a forward, so that all that is left is the host's. `streams` is what a server hands over beside that.
Compare figures of one run only; `PYTHONPATH=OLDER python benchmarks/host_step.py` measures an older checkout.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from megatron_ext.config import BatchingConfig, ModelConfig, RequestParams
from megatron_ext.engine import engine as engine_module
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.models.build import build_model
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.stepping.progress import Updates

REQUESTS = (64, 512)
VOCABULARY, BLOCK, CONTEXT = 97, 64, 1_000
STEPS = 64  # as many as a block has tokens, so that every request begins one of its own
GOAL = 1.5  # ms of a step with 64 decodes
MODEL = ModelConfig(
    hybrid_override_pattern="M*",
    hidden_size=32,
    num_attention_heads=2,
    mamba_state_dim=8,
    mamba_head_dim=8,
    mamba_num_groups=1,
    vocab_size=VOCABULARY,
)
GROUPS = {
    "plan": (Scheduler, "schedule"),
    "describe": (engine_module, "describe_step"),
    "stage": (InferenceContext, "stage"),
    "commit": (Scheduler, "commit"),
    "output": (Engine, "report"),
}
KINDS = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.9}}


class Ids:
    """Token ids as text."""

    eod = bos = None
    vocab_size = VOCABULARY

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text such as "1 2"."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The same backwards."""
        return " ".join(map(str, ids))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help=f"of {STEPS} steps")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens behind each request")
    parser.add_argument("--figures", type=Path, metavar="FILE.json", help="write them there, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(MODEL, device=torch.device("cpu"))
    found = {
        f"{count} {kind}": step_costs(model, count, options.context, params, options.rounds)
        for count in REQUESTS
        for kind, params in KINDS.items()
    }
    Console(highlight=False).print(costs_table(found, options.context))
    if options.figures is not None:
        options.figures.write_text(json.dumps(found, indent=1), "utf-8")
    platform.shut_down()


def costs_table(found: Mapping[str, Mapping[str, float]], context: int) -> Table:
    """Milliseconds of a step, by group."""
    table = Table("group", *(f"{name}, ms" for name in found), title=f"{context:,} tokens behind each request")
    for group in next(iter(found.values())):
        table.add_row(group, *(f"{costs[group]:.2f}" for costs in found.values()))
    return table


def step_costs(
    model: torch.nn.Module, requests: int, context: int, params: Mapping[str, object], rounds: int
) -> dict[str, float]:
    """Milliseconds of each group, the median of rounds; a round is the mean of its steps."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(InferenceController, "compute_step", _no_model))
        spent = {name: stack.enter_context(timed(*place)) for name, place in GROUPS.items()}
        engine = decoding_engine(model, requests, context, params, (rounds + 1) * STEPS)
        streams = Updates(engine.fail_request)
        streams.watch(range(requests))
        measured = [round_costs(engine, streams, spent) for _ in range(rounds + 1)][1:]  # the first warms up
        engine.suspend()
    costs = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    return {"plan + describe + stage + commit + output": sum(costs[name] for name in GROUPS), **costs}


def decoding_engine(
    model: torch.nn.Module, requests: int, context: int, params: Mapping[str, object], steps: int
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
    engine = build_engine(model, MODEL, Ids(), batching, dtype=torch.float32)
    wish = RequestParams(num_tokens_to_generate=steps + STEPS, ignore_eos=True, **params)
    for request_id in range(requests):
        engine.add_request(request_id, [source.randrange(VOCABULARY) for _ in range(context)], wish)
    while any(not engine.get_request(request_id).is_decoding for request_id in range(requests)):
        engine.step_modern()
    return engine


def round_costs(engine: InferenceEngine, streams: Updates, spent: Mapping[str, list[float]]) -> dict[str, float]:
    """Milliseconds of a step in each group, on average."""
    for seconds in spent.values():
        seconds.clear()
    start = time.thread_time()
    reports = []
    for _ in range(STEPS):
        reports.append(engine.step_modern())
    whole = time.thread_time() - start
    start = time.thread_time()
    living = [engine.get_request(name) for name in reports[-1]["active_request_ids"]]
    streams.of(living)
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
