"""Host cost of caching (hash, match, admit, release) beside plain hashlib over the same bytes, and of planning.

Run: `python -m benchmarks.host_path` (`--all`: other sizes, other pools, and planning while many wait, too). No model,
no torch: the scheduler alone. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import enum
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.prefix_cache.hash_chain import HASH_BYTES
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from megatron_ext.scheduling.submission import Submission

GOAL_SIZE = (256, 131_072)  # tokens of a block and of a prompt
SIZES = [(block_size, length) for block_size in (16, 256) for length in (2_048, 32_768, 131_072)]
QUEUES = ((2_000, 5_000), (32_000, 1_000))  # tokens of a prompt, prompts that wait
FEW = 10  # as many wait where planning is as cheap as it can be
DECODING = 4  # requests that run beside those that wait


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--all", action="store_true", help="every table, not only what there is a goal for")
    parser.add_argument("--figures", type=Path, metavar="FILE.json", help="write what was found there, too")
    parser.add_argument("--quick", action="store_true", help="so little that only errors show")
    parser.add_argument("--threads", type=int, default=1, help="nothing here has more than one")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    console = Console(highlight=False)
    costs = {one: path_cost(*one, repeats) for one in (SIZES if options.all else (GOAL_SIZE,))}
    console.print(cost_table(costs))
    if options.all:
        console.print(pool_table(repeats))
        console.print(waiting_table())
    if options.figures is not None:
        floor, cold, cached = costs[GOAL_SIZE]
        options.figures.write_text(json.dumps({"cold": cold / floor, "cached": cached / floor}), "utf-8")


def path_cost(block_size: int, length: int, repeats: int) -> tuple[float, float, float]:
    """Median seconds of the hashing floor, of a cold prompt and of a cached one, which take turns."""
    measures = (floor_seconds, cold_seconds, cached_seconds)
    rounds = [[measure(length, block_size) for measure in measures] for _ in range(repeats + 1)]
    floor, cold, cached = (statistics.median(times) for times in zip(*rounds[1:], strict=True))  # the first warms up
    return floor, cold, cached


def cost_table(costs: dict[tuple[int, int], tuple[float, float, float]]) -> Table:
    """Milliseconds, and multiples of the hashing floor."""
    table = Table("block", "tokens", "hashlib, ms", "cold, ms", "cached, ms", "cold / floor", "cached / floor")
    for (block_size, length), times in costs.items():
        ratios = (f"{value / times[0]:.2f}" for value in times[1:])
        table.add_row(str(block_size), f"{length:,}", *(f"{value * 1e3:.2f}" for value in times), *ratios)
    return table


def pool_table(repeats: int) -> Table:
    """Table of one admission in a pool and in a pool ten times as large."""
    table = Table("pool, blocks", "cold, ms", "cached, ms", title="32,768 tokens, blocks of 256")
    for blocks in (1_000, 10_000):
        cold = median(lambda blocks=blocks: cold_seconds(32_768, 256, blocks), repeats)
        cached = median(lambda blocks=blocks: cached_seconds(32_768, 256, blocks), repeats)
        table.add_row(f"{blocks:,}", f"{cold * 1e3:.2f}", f"{cached * 1e3:.2f}")
    return table


def waiting_table() -> Table:
    """Planning of a step while many wait, beside planning while few do."""
    title = f"`schedule` while requests of blocks of 16 wait; x {FEW}: beside {FEW} that wait"
    columns = ("who waits", "tokens", "waiting", "a step, us", f"x {FEW}", "worst, us", "first step, ms", "arrival, us")
    table = Table(*columns, title=title)
    for length, many in QUEUES:
        for kind in Waiting:
            few, cost = (waiting_cost(kind, length, count) for count in (FEW, many))
            for count, one in ((FEW, few), (many, cost)):
                table.add_row(
                    kind.value,
                    f"{length:,}",
                    f"{count:,}",
                    f"{one.step * 1e6:.0f}",
                    f"{one.step / few.step:.2f}",
                    f"{one.worst * 1e6:.0f}",
                    f"{one.first * 1e3:.2f}",
                    f"{one.arrival * 1e6:.0f}",
                )
    return table


class Waiting(enum.Enum):
    """Why requests wait."""

    UNRELATED = "unrelated, no blocks"
    FULL = "unrelated, batch full"
    FOLLOWERS = "followers of one leader"
    FOLLOWERS_FULL = "followers, batch full"


@dataclass(frozen=True)
class PlanningCost:
    """Seconds.

    Args:
        step: Median of `schedule` from the second step on.
        worst: The longest of these.
        first: The first step after all have come.
        arrival: A request's, on average.
    """

    step: float
    worst: float
    first: float
    arrival: float


def waiting_cost(kind: Waiting, length: int, count: int, steps: int = 60) -> PlanningCost:
    """Let `count` requests of `length` tokens wait beside some that decode, and plan."""
    scheduler = waiting_scheduler(kind, length)
    for arrival in range(DECODING):
        scheduler.add(make_request(arrival, 16, generate=1_000))
    run_step(scheduler)
    follows = kind in (Waiting.FOLLOWERS, Waiting.FOLLOWERS_FULL)
    requests = [waiting_request(DECODING + i, length, follows) for i in range(count + follows)]
    start = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    arrival = (time.perf_counter() - start) / len(requests)
    first, *seconds = [run_step(scheduler) for _ in range(steps)]
    if len(scheduler.queues.waiting) != count or len(scheduler.queues.running) != DECODING + follows:
        raise RuntimeError("the requests did not wait as they should")
    return PlanningCost(statistics.median(seconds), max(seconds), first, arrival)


def run_step(scheduler: Scheduler) -> float:
    """A step; seconds that its planning took."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    seconds = time.perf_counter() - start
    commit(scheduler, plan)
    return seconds


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """Commit a plan as if the step had been computed; every request due a token gets a zero."""
    message = describe_step(plan.chunks, scheduler.limits.block_size)
    scheduler.commit(message, {one.request_id: 0 for one in message.chunks if one.sampling is not None})


def waiting_scheduler(kind: Waiting, length: int) -> Scheduler:
    """A leader gets a block a step; what else waits gets nothing."""
    rows = {Waiting.FULL: DECODING, Waiting.FOLLOWERS_FULL: DECODING + 1}.get(kind, DECODING + 4)
    blocks = DECODING * 8 + (0 if kind is Waiting.UNRELATED else 2 * length // 16)
    limits = SchedulerLimits(
        block_size=16,
        total_blocks=max(blocks, length // 16 + 1),
        paused_blocks=None,
        max_requests=rows,
        max_tokens=DECODING + 16,
        max_sequence_length=length + 16,
        chunked_prefill=True,
    )
    return Scheduler(limits, EvictionPolicyName.LRU, b"benchmark")


def waiting_request(arrival: int, length: int, follows: bool) -> Request:
    """A prompt of its own, or one that all have but for the last block."""
    own = length if not follows else 16
    tokens = [*range(length - own), *range(1_000_000 + arrival, 1_000_000 + arrival + own)]
    return Request(Submission(arrival, tuple(tokens), RequestParams(num_tokens_to_generate=1_000), arrival, seed=0))


def median(measure: Callable[[], float], repeats: int) -> float:
    """Median of what `measure` gives, after one call that warms up."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def floor_seconds(length: int, block_size: int) -> float:
    """CPU seconds for one block hash a block over the tokens' bytes, and nothing else."""
    data = memoryview(array("I", prompt(length))).cast("B")
    stride = 4 * block_size
    start = time.thread_time()
    for offset in range(0, len(data), stride):
        blake2b(data[offset : offset + stride], digest_size=HASH_BYTES).digest()
    return time.thread_time() - start


def cold_seconds(length: int, block_size: int, blocks: int | None = None) -> float:
    """Seconds to queue, hash, plan, admit, publish and release a prompt that nothing is cached of."""
    return life_seconds(make_scheduler(length, block_size, blocks), make_request(0, length))


def cached_seconds(length: int, block_size: int, blocks: int | None = None) -> float:
    """Seconds of the life of a prompt that is cached whole."""
    scheduler = make_scheduler(length, block_size, blocks)
    life_seconds(scheduler, make_request(0, length))
    return life_seconds(scheduler, make_request(1, length))


def life_seconds(scheduler: Scheduler, request: Request) -> float:
    """CPU seconds of one request's life on the host, without what the device would do in between."""
    start = time.thread_time()
    scheduler.add(request)
    plan = scheduler.schedule()
    commit(scheduler, plan)
    seconds = time.thread_time() - start
    if not request.is_ended or len(plan.chunks) != 1:
        raise RuntimeError("the request did not live as it should")
    return seconds


def make_scheduler(length: int, block_size: int, blocks: int | None) -> Scheduler:
    """A scheduler with room for the prompt in one step."""
    limits = SchedulerLimits(
        block_size=block_size,
        total_blocks=blocks or 2 * length // block_size,
        paused_blocks=None,
        max_requests=4,
        max_tokens=length,
        max_sequence_length=length + 16,
        chunked_prefill=True,
    )
    return Scheduler(limits, EvictionPolicyName.LRU, b"benchmark")


def prompt(length: int) -> tuple[int, ...]:
    """Random token ids of a fixed seed."""
    source = random.Random(length)
    return tuple(source.randrange(130_000) for _ in range(length))


def make_request(arrival: int, length: int, generate: int = 1) -> Request:
    """A request of `prompt(length)`."""
    return Request(Submission(arrival, prompt(length), RequestParams(num_tokens_to_generate=generate), arrival, seed=0))


if __name__ == "__main__":
    main()
