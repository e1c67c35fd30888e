"""Scheduler whose steps all count as computed, for counts that do not depend on a model."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.batching import ENOUGH_PREFILL_TOKENS
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step

BLOCK, LONGEST = 64, 4_096
LIMITS = SchedulerLimits(
    block_size=BLOCK,
    total_blocks=1_600,
    paused_blocks=None,
    max_requests=16,
    max_tokens=2_048,
    max_sequence_length=LONGEST,
    chunked_prefill=True,
    enough_prefill_tokens=ENOUGH_PREFILL_TOKENS["cpu"],
)


class SimulatedEngine:
    """See `benchmarks.peers.work.Peer`. Answers are words of their own: a model's output does not affect the counts.

    Args:
        slots: For snapshots of recurrent states.
    """

    def __init__(self, slots: int = 64) -> None:
        self._scheduler = Scheduler(LIMITS, EvictionPolicyName.LRU, b"paper", slots)
        self._requests: dict[int, tuple[int, Request]] = {}
        self._count = 0

    def forget(self, shared: int = 0, *, continues: bool = False) -> None:
        """See `Peer`."""
        self._scheduler.reset_prefix_cache()

    def submit(self, key: int, prompt: list[int], count: int) -> None:
        """See `Peer`."""
        self._count += 1
        params = RequestParams(count, ignore_eos=True)
        request = Request(self._count, RequestInputs(tuple(prompt), params), self._count, seed=0)
        self._requests[self._count] = key, request
        self._scheduler.add(request)

    def step(self) -> Iterator[tuple[int, list[int], int, bool]]:
        """See `Peer`."""
        step = describe_step(self._scheduler.schedule().chunks, BLOCK)
        new = {one.request_id: 5_000 + one.request_id for one in step.chunks if one.sampling is not None}
        self._scheduler.commit(step, new)
        for name, token in new.items():
            key, request = self._requests[name]
            yield key, [token], request.ledger.skipped, request.is_ended
