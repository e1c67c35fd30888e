"""Measurement of what drafts cost: steps of an engine before its first request, with and without drafts (SP-6, SP-17).

Rank 0 measures, in steps of its engine that all ranks take as any other. Only rank 0 needs the result: it decides how
many drafts there are, and tells the ranks with each step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from megatron_ext.config import RequestParams
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.speculation.adaptive import fitted
from megatron_ext.speculation.drafting import Drafting

logger = logging.getLogger(__name__)

SECONDS, SIZE_SECONDS = 4.0, 0.5
"""Bounds of a measurement, and of one number of requests, unless a single round of steps takes longer."""
_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
_PROMPT = 16  # tokens
_ROUNDS = 5
_TIMED_STEPS = 3  # of each number of drafts in a round, after one that is not timed


def measure_costs(engine: InferenceEngine, drafting: Drafting, clock: Callable[[], float] = time.perf_counter) -> None:
    """Time decode steps with zero, one and the maximum drafts for 1, 2, 4, ... requests, and use the costs.

    The engine has no requests, and is reset after: nothing of the measurement is counted or cached.

    Args:
        engine: Engine of rank 0.
        drafting: Drafter of the engine.
        clock: Returns the time in seconds.
    """
    limits = engine.context.plan.limits
    drafts = tuple(dict.fromkeys((0, 1, limits.max_drafts)))
    seconds: dict[int, dict[int, float]] = {}
    began, taken = clock(), 0.0
    for requests in dict.fromkeys(min(count, limits.max_requests) for count in _REQUESTS):
        before = clock()
        if before - began + 2 * taken > SECONDS:  # twice the requests take up to twice as long
            break
        seconds[requests] = _step_seconds(engine, drafting, requests, drafts, clock)
        taken = clock() - before
    costs = fitted(seconds, limits.max_requests)
    if costs is None:
        logger.warning("the pools are too small to measure what drafts cost; assuming %s", drafting.costs)
    else:
        logger.info("drafts cost, in steps without drafts: %s", costs)
    drafting.use(costs or drafting.costs)
    engine.reset()


def _step_seconds(
    engine: InferenceEngine, drafting: Drafting, requests: int, drafts: Sequence[int], clock: Callable[[], float]
) -> dict[int, float]:
    """Return the seconds of the fastest step in which `requests` requests decode, by the drafts of each of them.

    The minimum excludes delays from other load on the machine. A number of drafts is missing if no step had it, since
    the pools do not hold all the requests, or too few tokens of each.
    """
    engine.reset()
    probe, end = drafting.probe(), clock() + SIZE_SECONDS
    _add_requests(engine, requests, requests + _ROUNDS * (1 + _TIMED_STEPS) * sum(1 + count for count in drafts))
    while not _all_decode(engine, requests):
        before = engine.core.counters.prefill_tokens
        engine.core.step()
        if engine.core.counters.prefill_tokens == before:
            return {}
    fastest: dict[int, float] = {}
    for _ in range(_ROUNDS):
        if fastest and clock() > end:
            break
        for probe.drafts in drafts:
            for number in range(1 + _TIMED_STEPS):
                if not _all_decode(engine, requests):
                    return fastest
                drafted, started = engine.core.counters.drafted, clock()
                engine.core.step()
                took = clock() - started
                if number and engine.core.counters.drafted - drafted == requests * probe.drafts:
                    fastest[probe.drafts] = min(took, fastest.get(probe.drafts, took))
    return fastest


def _add_requests(engine: InferenceEngine, requests: int, tokens: int) -> None:
    """Queue requests that generate `tokens` tokens each, or as many as the engine allows."""
    prompt = min(_PROMPT, engine.context.max_sequence_length // 2)
    params = RequestParams(
        num_tokens_to_generate=min(tokens, engine.context.max_sequence_length - prompt),
        ignore_eos=True,
        enable_prefix_caching=False,
    )
    ids = engine.controller.vocabulary.ids
    for i in range(requests):
        engine.add_request(i, [ids[(7 * i + j) % len(ids)] for j in range(prompt)], params, replica_index=0)


def _all_decode(engine: InferenceEngine, requests: int) -> bool:
    running = engine.core.scheduler.queues.running
    return len(running) == requests and all(request.is_decoding for request in running)
