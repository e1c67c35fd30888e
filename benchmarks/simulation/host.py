"""Host cost of the scheduler alone: the life of a prompt beside plain hashlib, and planning while many wait."""

from __future__ import annotations

import statistics
import time
from array import array
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

from benchmarks.cases import Run, case, token_ids
from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.prefix_cache.hash_chain import HASH_BYTES
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler

FEW, DECODING = 10, 4  # waiting requests where planning is cheapest; requests that run beside those that wait


@case("simulation", in_bench=True, quick={"repeats": 1})
def host_path(
    run: Run, repeats: int = 15, blocks: tuple = (256,), tokens: tuple = (131_072,), pool_factor: int = 2
) -> None:
    """CPU time to queue, hash, match, admit, publish and release a prompt, cold and cached, over plain hashlib."""
    for block_size in blocks:
        for length in tokens:
            pool = pool_factor * length // block_size
            rounds = [
                (floor_seconds(length, block_size), *path_seconds(length, block_size, pool)) for _ in range(repeats + 1)
            ]
            floor, cold, cached = (statistics.median(one) for one in zip(*rounds[1:], strict=True))  # one warms up
            run.row(
                f"{block_size} a block, {length:,} tokens",
                {
                    **{"hashlib, ms": 1e3 * floor, "cold, ms": 1e3 * cold, "cached, ms": 1e3 * cached},
                    **{"cold / hashlib": cold / floor, "cached / hashlib": cached / floor},
                },
            )


@cache
def _prompt(length: int) -> tuple[int, ...]:
    return tuple(token_ids(length, f"host {length}", 130_000))


def make_request(arrival: int, tokens: tuple[int, ...], generate: int = 1) -> Request:
    """Build a request without an engine."""
    return Request(arrival, RequestInputs(tokens, RequestParams(num_tokens_to_generate=generate)), arrival, seed=0)


def make_scheduler(block_size: int, blocks: int, rows: int, step_tokens: int, longest: int) -> Scheduler:
    """Build a scheduler without a model."""
    limits = SchedulerLimits(
        block_size=block_size,
        total_blocks=blocks,
        paused_blocks=None,
        max_requests=rows,
        max_tokens=step_tokens,
        max_sequence_length=longest,
        chunked_prefill=True,
    )
    return Scheduler(limits, EvictionPolicyName.LRU, b"benchmark")


def floor_seconds(length: int, block_size: int) -> float:
    """Return the CPU seconds of one hash a block over the tokens' bytes."""
    data = memoryview(array("I", _prompt(length))).cast("B")
    stride = 4 * block_size
    start = time.thread_time()
    for offset in range(0, len(data), stride):
        blake2b(data[offset : offset + stride], digest_size=HASH_BYTES).digest()
    return time.thread_time() - start


def path_seconds(length: int, block_size: int, pool: int) -> tuple[float, float]:
    """Return the CPU seconds of a prompt that nothing is cached of, and of the same prompt again."""
    scheduler = make_scheduler(block_size, pool, 4, length, length + 16)
    taken = []
    for arrival in range(2):
        request = make_request(arrival, _prompt(length))
        start = time.thread_time()
        scheduler.add(request)
        plan = scheduler.schedule()
        commit(scheduler, plan)
        taken.append(time.thread_time() - start)
        if not request.is_ended or len(plan.chunks) != 1:
            raise RuntimeError("the request did not live as it should")
    return taken[0], taken[1]


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """Commit a plan as if the step had been computed; every request due a token gets token 0."""
    message = scheduler.describe(plan)
    scheduler.commit(message, {one.request_id: 0 for one in message.chunks if one.sampling is not None})


# Planning while requests wait


@dataclass(frozen=True)
class Waiting:
    """Reason why requests wait.

    Attributes:
        follows: True if they share a prefix that a leader computes.
        rows: Requests of the batch beside those that decode.
        has_blocks: True if there are blocks for more requests.
    """

    follows: bool
    rows: int
    has_blocks: bool = True


KINDS = {
    "unrelated, no blocks": Waiting(False, 4, has_blocks=False),
    "unrelated, batch full": Waiting(False, 0),
    "followers of one leader": Waiting(True, 4),
    "followers, batch full": Waiting(True, 1),
}


@case("simulation", quick={"lengths": (1_000,), "waiting": (20,), "steps": 5})
def waiting_requests(
    run: Run, lengths: tuple = (2_000, 32_000), waiting: tuple = (5_000, 1_000), steps: int = 60
) -> None:
    """Planning of a step while many requests wait, beside planning while ten do; blocks of 16 tokens."""
    for length, many in zip(lengths, waiting, strict=True):
        for name, kind in KINDS.items():
            few, cost = (planning_cost(kind, length, count, steps) for count in (FEW, many))
            found = {f"{column}, us": 1e6 * seconds for column, seconds in cost.items()}
            found |= {f"a step beside {FEW} waiting, us": 1e6 * few["a step"], "ratio": cost["a step"] / few["a step"]}
            run.row(f"{name}, {many:,} of {length:,} tokens", found)


def planning_cost(kind: Waiting, length: int, count: int, steps: int) -> dict[str, float]:
    """Let requests wait beside some that decode; return the seconds of planning a step and of an arrival."""
    blocks = DECODING * 8 + 2 * length // 16 * kind.has_blocks
    scheduler = make_scheduler(16, max(blocks, length // 16 + 1), DECODING + kind.rows, DECODING + 16, length + 16)
    for arrival in range(DECODING):
        scheduler.add(make_request(arrival, _prompt(16), 1_000))
    _step_seconds(scheduler)
    requests = [_waiting_request(DECODING + i, length, kind.follows) for i in range(count + kind.follows)]
    start = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    arrival_seconds = (time.perf_counter() - start) / len(requests)
    first, *seconds = [_step_seconds(scheduler) for _ in range(steps)]
    if len(scheduler.queues.waiting) != count or len(scheduler.queues.running) != DECODING + kind.follows:
        raise RuntimeError("the requests did not wait as they should")
    costs = {"a step": statistics.median(seconds), "the longest": max(seconds), "the first": first}
    return {**costs, "an arrival": arrival_seconds}


def _step_seconds(scheduler: Scheduler) -> float:
    """Take a step; return the seconds of its planning."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    seconds = time.perf_counter() - start
    commit(scheduler, plan)
    return seconds


def _waiting_request(arrival: int, length: int, follows: bool) -> Request:
    """Build a prompt of its own, or one whose last block alone is its own."""
    own = 16 if follows else length
    tokens = (*range(length - own), *range(1_000_000 + arrival, 1_000_000 + arrival + own))
    return make_request(arrival, tokens, 1_000)
