"""Cost table of draft verification: configured, the device's default, or measured at the start."""

from __future__ import annotations

import logging
import time

from megatron_ext.config import RequestParams
from megatron_ext.config.draft_costs import DEFAULT_COSTS, CostTable, Timing, fitted
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.files import read_text
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.speculation.drafting import Drafting

logger = logging.getLogger(__name__)

_LONGEST_TABLE = 64 * 1024  # bytes
_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
_PROMPT = 24  # tokens
_STEPS = 7  # timed steps of each kind


def chosen_costs(config: SpeculationConfig, device_type: str) -> CostTable:
    """Return the initial cost table.

    Raises:
        ConfigError: The file cannot be read, or has no table.
    """
    given = config.speculative_cost_table
    if given is None:
        return CostTable.parse(DEFAULT_COSTS.get(device_type, DEFAULT_COSTS["cuda"]))
    return CostTable.parse(given if CostTable.is_one(given) else read_text(given, _LONGEST_TABLE))


def measure_costs(engine: InferenceEngine, drafting: Drafting) -> None:
    """Time decode steps of this engine with zero, one and the maximum drafts, for 1, 2, 4, ... requests.

    All ranks take part, as in other steps; only rank 0 needs the result. The engine has no requests and is reset after:
    nothing of the measurement is counted or cached.
    """
    limits = engine.context.plan.limits
    sizes = sorted({*(n for n in _REQUESTS if n < limits.max_requests), min(limits.max_requests, _REQUESTS[-1])})
    timings: list[Timing] = []
    for requests in sizes:
        kinds = tuple(dict.fromkeys((0, 1, limits.max_drafts)))
        found = [(drafts, _step_seconds(engine, drafting, requests, drafts)) for drafts in kinds]
        if any(seconds is None for _, seconds in found):  # the pools do not hold so many requests
            break
        timings += [Timing(requests, drafts, seconds) for drafts, seconds in found if seconds is not None]
    if timings:
        drafting.use(fitted(timings))
        logger.info("measured cost of drafts in plain steps: --speculative-cost-table %s", drafting.costs)
    else:
        logger.warning("the cost of drafts could not be measured in these pools; using the table %s", drafting.costs)
    engine.reset()


def _step_seconds(engine: InferenceEngine, drafting: Drafting, requests: int, drafts: int) -> float | None:
    """Return the seconds of the fastest step in which `requests` requests decode with `drafts` drafts each.

    None if no step has that many. The minimum excludes delays from other load on the machine.
    """
    engine.reset()
    drafting.probe(drafts)
    steps = _STEPS + requests + 3  # upper bound if requests start one after another
    count = min(steps * (drafts + 1), engine.context.max_sequence_length - _PROMPT)
    params = RequestParams(num_tokens_to_generate=count, ignore_eos=True, enable_prefix_caching=False)
    ids = engine.controller.vocabulary.ids
    for i in range(requests):
        prompt = [ids[(7 * i + j) % len(ids)] for j in range(_PROMPT)]
        engine.add_request(i, prompt, params, turn=0)
    seconds: list[float] = []
    while engine.has_unfinished_requests() and len(seconds) < _STEPS:
        running = engine.scheduler.queues.running
        all_decode = len(running) == requests and all(request.is_decoding for request in running)
        before, started = engine.core.counters.drafted, time.perf_counter()
        engine.core.step()
        took = time.perf_counter() - started
        if all_decode and engine.core.counters.drafted - before == requests * drafts:
            seconds.append(took)
    return min(seconds) if len(seconds) > _STEPS // 2 else None
