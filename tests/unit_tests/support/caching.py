"""A driver with the prefix cache on: matches, skips, accounts and KV writes are checked in every step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import pytest

from megatron_ext.config import CacheConfig, EvictionPolicyName
from megatron_ext.mcore.layers import attention
from megatron_ext.scheduling.record import RequestRecord
from tests.unit_tests.support.cache_model import CacheModel
from tests.unit_tests.support.driver import Driver
from tests.unit_tests.support.kv_writes import KvWrites

BLOCK = 16  # tokens; the default of `Driver`
# What `flops` chooses the state machines of the cache judge; to an engine it is `lru` with other victims.
POLICIES = [EvictionPolicyName.LRU.value, EvictionPolicyName.REF_ZERO.value]


class CachingDriver(Driver):
    """See the module. Prompt log-probs are not asked for unless a request says so: they turn skipping off.

    Args:
        policy: "lru" or "ref_zero".
        kwargs: Keywords of `Driver`.
    """

    def __init__(self, *args: object, policy: str = "lru", **kwargs: object) -> None:
        self.policy = EvictionPolicyName(policy)
        super().__init__(*args, cache=CacheConfig(eviction_policy=policy), **kwargs)

    def watch_scheduler(self) -> None:
        super().watch_scheduler()
        self.model = CacheModel(self.scheduler, self.policy)
        self.writes = KvWrites(self.context, self.engine.scheduler, self.model.shared_blocks)

    def _run_forward(self, forward, inputs):
        return self.writes.watch(forward, inputs)

    def add(self, request_id: int, prompt: str | Sequence[int], **params: object) -> asyncio.Future[RequestRecord]:
        return super().add(request_id, prompt, **({"skip_prompt_log_probs": True} | params))

    def step(self) -> dict:
        result = super().step()
        for record in result["finished_request_records"]:
            self.model.check(record)
        return result

    def run(self) -> dict[int, RequestRecord]:
        records = super().run()
        skipped = sum(record.skipped_prefill_token_count for record in records.values())
        assert self.engine.lifetime_skipped_token_count == skipped
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
        yield
