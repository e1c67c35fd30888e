"""A driver with the prefix cache on: KV writes are checked in every step, and matched blocks are noted.

Which blocks match and where a request resumes is checked by `tests/unit_tests/scheduling/caching_machine.py`, against
brute force over token lists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from megatron_ext.config import CacheConfig
from megatron_ext.mcore.layers import attention
from megatron_ext.runner.recorded_steps import RecordedSteps
from megatron_ext.scheduling.plan import Admission
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from tests.unit_tests.support.driver import Driver
from tests.unit_tests.support.kv_writes import KvWrites

BLOCK = 16  # tokens; the default of `Driver`


class CachingDriver(Driver):
    """See the module. Prompt log-probs are not asked for unless a request says so: they turn skipping off.

    Attributes:
        matched: Blocks that were matched at each admission, by request id.

    Args:
        policy: "lru" or "ref_zero".
        log_probs: Whether prompt log-probs are kept with their blocks.
        kwargs: Keywords of `Driver`.
    """

    def __init__(self, *args: object, policy: str = "lru", log_probs: bool = False, **kwargs: object) -> None:
        cache = CacheConfig(eviction_policy=policy, prefix_cache_log_probs=log_probs)
        super().__init__(*args, **({"cache": cache} | kwargs))

    def watch_scheduler(self) -> None:
        super().watch_scheduler()
        self.matched: dict[int, list[int]] = defaultdict(list)
        self.writes = KvWrites(self.context, self.engine.core.scheduler, self._shared_blocks)
        admit = self.scheduler._admit

        def admit_watched(admission: Admission) -> None:
            self.matched[admission.request.request_id].append(len(admission.matched))
            admit(admission)

        self.scheduler._admit = admit_watched

    def _shared_blocks(self, request: Request) -> set[int]:
        """Blocks that `request` found in the cache when it was admitted."""
        return set(request.block_table[: self.matched[request.request_id][-1]])

    def _run_forward(self, forward):
        return self.writes.watch(forward)

    def add(self, request_id: int, prompt: str | Sequence[int], **params: object) -> asyncio.Future[RequestRecord]:
        return super().add(request_id, prompt, **({"skip_prompt_log_probs": True} | params))

    def run(self) -> dict[int, RequestRecord]:
        records = super().run()
        skipped = sum(record.skipped_prefill_token_count for record in records.values())
        assert self.engine.core.counters.skipped_tokens == skipped
        return records

    def skipped(self, *request_ids: int) -> list[int]:
        """Prompt tokens that were not computed, of these ended requests."""
        return [self.records[request_id].skipped_prefill_token_count for request_id in request_ids]


class Broken(RuntimeError):
    """Error that a failing forward raises."""


@contextlib.contextmanager
def failing_forward(layer: int = 1) -> Iterator[None]:
    """Within it, attention raises in its `layer`-th call, when earlier layers have written their KV; once."""
    calls = iter(range(1_000_000))
    operator = attention.paged_attention

    def call(*args: object, **kwargs: object) -> object:
        if next(calls) == layer:
            raise Broken("the device is gone")
        return operator(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "paged_attention", call)
        patch.setattr(RecordedSteps, "stage", lambda *_: None)  # the model's Python code runs
        yield
