"""Profile of a cold prefill and of a decode step, in groups of operations.

Run: `python -m benchmarks.profile`. Time of operations themselves, by torch's profiler; what is left of the
wall time is the host's: planning, staging, Python between operations.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from benchmarks.base_speed import prompts
from benchmarks.measuring import header, keep_figures, part_arguments
from benchmarks.nemotron_shaped import build_pair
from megatron_ext.config import RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine

# The first group whose words are in an operation's name; the rest is element-wise work and copies.
GROUPS = {
    "products": ("mm", "linear", "matmul"),
    "attention": ("attention",),
    "scans": ("ssd", "scan", "delta_rule", "cumsum"),
    "convolution": ("conv",),
    "norms": ("norm",),
    "sampling": ("argmax", "softmax", "topk", "sort", "cumsum"),
}
REST, HOST = "element-wise, copies", "host"
PREFILL, REQUESTS, CONTEXT, STEPS = 2_176, 8, 128, 4


def main() -> None:
    """Measure and print."""
    options = part_arguments(__doc__).parse_args()  # it is quick in any case
    torch.set_num_threads(options.threads)
    device = platform.device()
    pair = build_pair(device, torch.float32)
    console = Console(highlight=False)
    console.print(header(device, torch.float32), markup=False)
    columns = {
        f"prefill of {PREFILL:,}, ms": prefill_groups(pair.engine()),
        f"decode of {REQUESTS}, ms a step": decode_groups(pair.engine()),
    }
    table = Table("group", *columns)
    for group in (*GROUPS, REST, HOST):
        table.add_row(group, *(f"{groups.get(group, 0.0):.2f}" for groups in columns.values()))
    table.add_row("together", *(f"{sum(groups.values()):.2f}" for groups in columns.values()))
    console.print(table)
    keep_figures(options, columns)
    platform.shut_down()


def prefill_groups(engine: InferenceEngine) -> Counter[str]:
    """Profile one cold prompt, after two that warm up."""
    for request_id in range(2):
        engine.add_request(request_id, prompts(1, PREFILL + request_id)[0].tolist(), RequestParams(1))
        drain(engine)
    engine.add_request(2, prompts(1, PREFILL)[0].tolist(), RequestParams(1))
    return grouped(lambda: drain(engine), 1)


def decode_groups(engine: InferenceEngine) -> Counter[str]:
    """Profile a decode step, on average."""
    for request_id, tokens in enumerate(prompts(REQUESTS, CONTEXT).tolist()):
        engine.add_request(request_id, tokens, RequestParams(10 * STEPS))
    while engine.waiting_request_ids or any(not one.is_decoding for one in engine.scheduler.queues.running):
        engine.step_modern()
    return grouped(lambda: [engine.step_modern() for _ in range(STEPS)], STEPS)


def drain(engine: InferenceEngine) -> None:
    """Step until no request is left."""
    while engine.has_unfinished_requests():
        engine.step_modern()


def grouped(work: object, times: int) -> Counter[str]:
    """Milliseconds of each group, of one of so many times."""
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    wall = 1e3 * (time.perf_counter() - start) / times
    groups: Counter[str] = Counter()
    for event in profiled.key_averages():
        groups[group_of(event.key)] += event.self_cpu_time_total / 1e3 / times
    groups[HOST] = max(0.0, wall - sum(groups.values()))
    return groups


def group_of(name: str) -> str:
    """Group of an operation."""
    lowered = name.lower()
    return next((group for group, words in GROUPS.items() if any(word in lowered for word in words)), REST)


if __name__ == "__main__":
    main()
